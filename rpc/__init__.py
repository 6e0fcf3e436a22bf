"""Processes: gRPC services, frontend streams, metrics, the Python API, the command line.

Three wings, whose imports form one line that import-linter checks (`pyproject.toml`):

- Serving answers requests: `server`, `services`, `access`, `frontend`, `observe`.
- Engines compute them, in a thread, a process or a Ray actor: `hosts`, `cluster`, `engines`, `link`.
- Applications are built upon both, and neither imports them: `cli`, `batch`, `loadgen`, `offline`, `ray_serve`,
  `terminal`, `web`, `gateway`, `client`. `client` in turn imports nothing of a server.

Serving stands on both sides of the engines: `server`, `services` and `access` open ports and answer calls; engines are
attached to `frontend`, and all report to `observe`.
"""
