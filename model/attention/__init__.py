"""Attention over paged keys and values: the contract of a back end, and the planning that back ends share.

Knows no device: kernels are in `model.cpu`, `model.gpu` and `model.reference`.
"""
