"""Benchmarks and loads, run from the repository: each prints what it measured in one run."""
