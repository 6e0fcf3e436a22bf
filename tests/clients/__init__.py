"""Real clients, run as processes against a server and a gateway: `make test-clients`."""
