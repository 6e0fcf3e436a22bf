"""Rank groups (tensor parallelism): connections of the ranks, collectives, and steps that rank 0 sends to followers.

Knows no scheduler and launches no process: `rpc` starts the ranks.
"""
