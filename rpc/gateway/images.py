"""Decodes the images of a conversation from data URLs. Nothing is fetched; the server checks the files' content."""

import base64
import binascii
from typing import Any

from pydantic_core import PydanticCustomError

KINDS = ("image/png", "image/jpeg", "image/jpg")


def image_bytes(url: Any) -> bytes:
    """Returns the bytes of a data URL (data:image/png;base64,...), or those given. Raises PydanticCustomError."""
    if isinstance(url, bytes):  # of a response's item, which is decoded already; JSON has none
        return url
    if not isinstance(url, str) or not url[:5].lower() == "data:":
        raise PydanticCustomError(
            "image_url", "must be a data URL (data:image/png;base64,...): the server fetches nothing"
        )
    head, comma, data = url[5:].partition(",")
    kind, *parameters = head[:200].lower().split(";")
    if kind not in KINDS or parameters != ["base64"] or not comma:
        raise PydanticCustomError("image_url", "must begin with data:image/png;base64, or data:image/jpeg;base64,")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise PydanticCustomError("image_url", "is no base64 after its comma") from None
