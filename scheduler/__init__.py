"""Decisions: requests and their validation, running rows, admission, the step plan, and the engine's loop. No torch."""
