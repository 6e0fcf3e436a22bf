"""How the next token is drawn."""
