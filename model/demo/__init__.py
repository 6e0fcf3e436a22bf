"""The demo model: its text, its training, its checkpoint. Serving uses the checkpoint alone."""
