"""Engines: assembled from a model and a scheduler, run in a thread or a process, kept running. Knows nothing of Ray."""
