"""Draws the next tokens."""
