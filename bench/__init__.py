"""Benchmarks and loads, run from the repository. Each prints the figures of one run; the product imports none."""
