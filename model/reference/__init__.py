"""The reference back end: torch, layer by layer, on any device. The others are tested against it."""
