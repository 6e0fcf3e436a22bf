"""Structured output in an engine: grammars, the tokens that may follow, and masks of logits."""
