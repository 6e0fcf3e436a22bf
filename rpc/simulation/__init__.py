"""Simulation of engines and of whole deployments on a virtual clock, with the code that serves."""
