"""A short name of `rpc.cluster.serve_app:app`, for `serve run --app-dir deploy/ray quire_serve:app model=DIR`."""

from rpc.cluster.serve_app import app

__all__ = ["app"]
