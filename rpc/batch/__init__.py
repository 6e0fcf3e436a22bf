"""Batch jobs: a file of requests in, a file of results out, in the same order, resumed where it stopped."""
