"""Quantizes a GGUF file with llama.cpp's own quantizer, in its default mix of types. Needs llama-cpp-python.

Output layers and embeddings are in what llama.cpp gives them. Where a type's blocks do not divide the inputs of a
linear, llama.cpp takes another type: 576 inputs are no multiple of Q4_K's 256, and are in Q5_0.

python -m bench.peers.llama_cpp_quantizer IN.gguf q8_0|q4_0|q4_k_m OUT.gguf
"""

import ctypes
import os
import sys


def quantize(source: str, kind: str, out: str) -> None:
    """Writes the file. Raises RuntimeError where llama.cpp refuses."""
    import llama_cpp as lib

    silent = lib.llama_log_callback(lambda *_: None)  # it would print a line a tensor
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    options = lib.llama_model_quantize_default_params()
    options.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    options.nthread = os.cpu_count() or 1
    if lib.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp cannot make {out}")


if __name__ == "__main__":
    quantize(*sys.argv[1:])
