"""Requests on their way to an engine, and their streams on the way back. Imports no torch."""
