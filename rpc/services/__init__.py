"""The public gRPC services."""
