"""Bookkeeping of the paged KV cache: which page holds which tokens, and which rows and steps hold which page.

Holds page tables, holder counts, the prefix index, eviction policies and the slots of the host tier. Pages, rows and
slots are numbers here. The package knows no KV bytes, no devices, no tensors of torch, no clock, no network and no
requests: times and step numbers come in as arguments. `scheduler` calls `manager.CacheManager`; executors apply the
`changes.PageChanges` of each step plan.

Invariant: a page is free, held, cached or set aside, and its count is the number of page tables and steps in flight
that hold it. `ledger` checks it.
"""
