"""Quire as an application of Ray Serve: the gateway as its ingress, a server beside each replica.

The gateway and the server are those of `quire gateway` and `quire serve`; neither knows Ray Serve.
"""
