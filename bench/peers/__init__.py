"""Quire beside vLLM, llama.cpp and transformers: the same requests on the same model, turn by turn on one machine.

The others are not dependencies of Quire, and are at odds with each other's: each has a virtual environment of its own.
What is run there (`worker`, `workloads` and one file an engine) needs nothing but that engine.
"""
