"""Images of a batch job's line: base64, as JSON has bytes, or the name of a file, which ends as one of images does.

No base64 has a dot. A name is taken from the folder of the input. Files are read when their line is run.
"""

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path

from quire.v1 import generation_service_pb2 as pb

from rpc.frontend.errors import invalid
from rpc.image_files import read_image
from scheduler.request import InvalidRequest

ENDINGS = (".png", ".jpg", ".jpeg")
STANDARD = str.maketrans("-_", "+/")


@dataclass(frozen=True, slots=True)
class NamedFile:
    """field: of the line, for errors. image: of the line's request, empty until `read`."""

    field: str
    path: Path
    image: pb.Image

    def read(self) -> None:
        """Raises RequestFailed."""
        try:
            self.image.data = read_image(self.path)
        except (OSError, ValueError) as error:
            raise invalid(InvalidRequest(self.field, str(self.path), f"cannot be read: {error}")) from None


def set_image(image: pb.Image, value: object, field: str, folder: Path) -> NamedFile | None:
    """What is still to be read; None where the value has it all. Raises RequestFailed."""
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
