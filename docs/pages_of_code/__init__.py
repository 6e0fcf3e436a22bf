"""Reference pages that are written from the code. `make reference` writes them, `make lint` compares.

A module has `page()`, which returns the text of one page of docs/reference.
"""
