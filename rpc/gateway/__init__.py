"""An OpenAI-compatible HTTP server over quire.v1, in a process of its own. Imports no torch."""
