"""Images as models take them: tiles of pixels, and the place of each in the prompt. Imports no torch."""
