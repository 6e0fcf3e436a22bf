"""The engine link: events to an engine and step outputs from it, over one gRPC stream.

Holds both ends of the link, its messages' codec, KV transfers between engines, and the table of a server's engines.
Knows an engine by its contracts alone (`EngineClient`, `PagePort`): neither how it is started nor what computes it.
Imports no torch.
"""

HEARTBEAT = 0.25
"""Seconds between an engine's messages while it has no outputs."""

LISTENING = [
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 2_000),  # a frontend behind a cut cable leaves no other sign
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
"""Options of an engine's end."""

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
