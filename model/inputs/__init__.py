"""Inputs of a model on a frontend: tokenizers, stop strings, chat templates and images.

Imports no torch, and knows no engine. A checkpoint's tokenizer and template are untrusted programs, which run in
processes with limits first.
"""
