"""The engine link: events to an engine and step outputs from it, over one gRPC stream. Imports no torch."""

HEARTBEAT = 0.25
"""Seconds between an engine's messages where there is nothing to tell."""

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
