"""Load generator of `quire bench serve`: puts a load on a running server, and measures as its clients.

Knows a server by its protocol alone, and imports no torch.
"""
