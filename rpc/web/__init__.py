"""The dashboard in a browser, for operators: engines, KV pages, requests, throughput and a prompt box.

It runs in a server's process and asks its frontend directly. It knows no engine.
"""
