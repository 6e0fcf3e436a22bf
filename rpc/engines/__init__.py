"""Where engines run: a thread of the server, a process of its own, a Ray actor; and what keeps one running."""
