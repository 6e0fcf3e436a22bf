"""From text to token ids and back. Imports no torch: frontends use it."""
