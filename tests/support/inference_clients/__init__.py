"""Clients of the Open Inference Protocol as others publish them, each a program that prints what it was told as JSON.

They import nothing of Quire: kserve lives in an environment of its own.
"""
