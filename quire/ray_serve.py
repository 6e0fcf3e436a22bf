"""Quire as an application of Ray Serve: `serve run quire.ray_serve:app model=DIR replicas=2`.

The arguments are flags of `quire serve` without their dashes; a flag without a value has the value "true".
"""

from quire.packages import PACKAGES, check_packages

check_packages(*PACKAGES)

from rpc.ray_serve.app import app  # noqa: E402 - a module that hides `rpc` is named first

__all__ = ["app"]
