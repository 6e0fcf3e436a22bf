"""A ledger of steps on a GPU that is not here: launches, bytes, operations, floor, and a predicted time."""
