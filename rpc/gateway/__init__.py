"""An OpenAI-compatible HTTP server over quire.v1, in a process of its own.

It reads HTTP requests, asks servers by gRPC, and writes HTTP responses. Imports no torch, and knows no engine.
"""
