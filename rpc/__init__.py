"""Processes: gRPC services, frontend streams, metrics, the Python API, the command line."""
