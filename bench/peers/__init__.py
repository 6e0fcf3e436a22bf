"""Quire beside vLLM, llama.cpp and transformers: the same requests on the same model, interleaved on one machine.

The others are no dependencies of Quire, and conflict with each other: each has a virtual environment of its own. The
modules that run there (`worker`, `workloads` and one file an engine) import only that engine.
"""
