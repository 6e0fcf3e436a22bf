"""Engines: assembled from a model and a scheduler, run in a thread or a process, kept running.

Holds the fleets behind a frontend: own engines with their hosts, supervisor and scaling, and engines of another
server. Knows nothing of Ray (`rpc.cluster`) and nothing of the public API (`rpc.services`).
"""
