"""GGUF: models as llama.cpp writes them, with configuration, tokenizer and weights in one file, or in parts of one.

The files are read as they are. `reader` parses a file, `split` finds the parts of a model, `config`, `names` and
`tokenizer` say what a model directory of the Hugging Face hub would say. Nothing here imports other packages' formats;
only `quants` and `source` import torch.
"""
