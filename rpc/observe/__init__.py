"""A server's metrics, logs and traces.

Holds metric families, their HTTP server, log lines and spans. Knows neither frontends nor engines: they call it with
counts, stats and records. None of it has the text of a request.
"""
