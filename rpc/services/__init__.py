"""The public gRPC services: quire.v1, health, and the Open Inference Protocol (`inference`).

They turn messages into calls of a `Frontend` and its streams into messages. They know no engine but through the
frontend and the fleet, and open no ports.
"""
