"""Simulated engines: a step takes the time that a profile says, and draws tokens without a model. Imports no torch.

An engine of `--model sim:NAME` has the real scheduler, cache manager and frontend. Its executor is `executor.py`. The
checkpoint beside it has a tokenizer and a chat template, and no weights.
"""
