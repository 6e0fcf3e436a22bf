"""Quire as an application of Ray Serve: the gateway as its ingress, a server beside each replica."""
