"""Which page holds what: bookkeeping of the paged KV cache. No bytes, no clock, no I/O, no torch."""
