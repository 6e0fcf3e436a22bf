"""Tensor parallelism: one model on several processes, each with a part of every layer."""
