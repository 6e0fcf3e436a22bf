"""Images of a batch job's line: base64, or the name of a file with the ending of an image.

Base64 has no dot, so the two differ. A name is relative to the folder of the input. Files are read when their line
runs.
"""

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path

from quire.v1 import generation_service_pb2 as pb

from rpc.frontend.errors import invalid
from rpc.image_files import read_image
from scheduler.invalid import InvalidRequest

ENDINGS = (".png", ".jpg", ".jpeg")
STANDARD = str.maketrans("-_", "+/")


@dataclass(frozen=True, slots=True)
class NamedFile:
    """An image whose file is still to be read.

    Attributes:
        field: Field of the line, for errors.
        path: The file.
        image: The image in the line's request; empty until `read`.
    """

    field: str
    path: Path
    image: pb.Image

    def read(self) -> None:
        """Reads the file into the request. Raises RequestFailed."""
        try:
            self.image.data = read_image(self.path)
        except (OSError, ValueError) as error:
            raise invalid(InvalidRequest(self.field, str(self.path), f"cannot be read: {error}")) from None


def set_image(image: pb.Image, value: object, field: str, folder: Path) -> NamedFile | None:
    """Sets an image of a request from its JSON value.

    Args:
        image: Message to fill.
        value: Base64 or the name of a file.
        field: Name of the value, for errors.
        folder: Folder of the input.

    Returns:
        The file that is still to be read; None for base64.

    Raises:
        RequestFailed: The value is neither.
    """
    if not isinstance(value, str):
        raise invalid(InvalidRequest(field, value, "must be base64 or the name of a file"))
    if value.lower().endswith(ENDINGS):
        image.SetInParent()
        return NamedFile(field, folder / value, image)
    text = value.translate(STANDARD).rstrip("=")
    try:
        image.data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise invalid(
            InvalidRequest(field, value, f"is no base64, and no name of a file, which ends with {', '.join(ENDINGS)}")
        ) from None
    return None
