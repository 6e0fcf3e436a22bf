"""Reference back end: torch, layer by layer, on any device. Other back ends are tested against it.

Holds attention in plain torch and no kernels.
"""
