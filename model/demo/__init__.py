"""The demo model: its text, its training, its checkpoint."""
