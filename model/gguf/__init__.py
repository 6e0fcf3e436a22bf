"""GGUF: models as llama.cpp writes them, with configuration, tokenizer and weights in one file, or in parts of one.

The files are read as they are. `reader` parses a file, `split` finds the parts of a model. `config`, `names` and
`tokenizer` say what a model directory of the Hugging Face hub would say. `model.gguf_weights` has the tensors,
`model.weight_formats.gguf` multiplies with them.
"""
