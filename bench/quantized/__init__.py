"""Writers of checkpoints in the weight formats that Quire serves, apart from the code that reads them.

Weights are rounded to the nearest numbers that a format holds, without calibration. The tests write their checkpoints
with the same code. Needs numpy, torch and, for GGUF, the gguf package.
"""
