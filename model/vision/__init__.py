"""Encoders of images, and what makes features of a text model's width of what they see."""
