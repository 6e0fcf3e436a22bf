"""The engine link: events to an engine and step outputs from it, over one gRPC stream. Imports no torch."""

HEARTBEAT = 0.25
"""Seconds between an engine's messages where there is nothing to tell."""

LISTENING = [
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 2_000),  # a frontend behind a cut cable leaves no other sign
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
"""Of an engine's end."""

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
