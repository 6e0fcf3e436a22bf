"""Engines as actors of a Ray cluster: Ray places, names and watches them; tokens go over the engine link."""
