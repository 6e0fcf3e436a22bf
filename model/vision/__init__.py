"""Image encoders, and the connectors that map their outputs to features of a text model's width.

Knows pixels and tensors, and nothing of prompts: `model.inputs.vision` cuts images and writes their placeholders.
"""
