"""XGrammar as the library of structured output: what of a constraint it enforces, in its own form, and its matcher."""
