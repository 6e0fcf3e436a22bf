"""Tensors: checkpoints, architectures, attention back ends, the KV pool's bytes, sampling, and the runner of a step."""
