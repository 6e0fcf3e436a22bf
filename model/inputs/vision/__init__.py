"""Images as models take them: pixels, the grid of features, and placeholders in the prompt. Imports no torch.

Knows no encoder: `model.vision` makes features of the pixels.
"""
