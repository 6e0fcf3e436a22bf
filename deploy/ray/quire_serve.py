"""A short name of `rpc.ray_serve.app:app`, for `serve run --app-dir deploy/ray quire_serve:app model=DIR`."""

from rpc.ray_serve.app import app

__all__ = ["app"]
