"""Terminal views: a server at work (`quire top`), and a conversation with its model (`quire chat`).

A client of the gRPC API alone: nothing here knows an engine.
"""
