"""A load on a running server, and what its clients saw of it: `quire bench serve`. Imports no torch."""
