"""A page in the browser for who runs a server: its engines, their KV pages, requests, throughput, and a prompt box."""
