"""What a person looks at in a terminal: a server at work, and a conversation with its model."""
