"""Engines as actors of a Ray cluster: Ray places, names and watches them; tokens go over the engine link.

Holds the server's side (`host`), the process with Ray's driver (`driver`), and the actors. The server's side imports
neither ray nor torch. Nothing here knows of requests or streams.
"""
