"""The error of a client's value that cannot be served."""

from collections.abc import Sequence

MOST_SHOWN, MOST_NAMED, MOST_REASON = 60, 200, 500  # characters of an error's value, field and reason


class InvalidRequest(ValueError):
    """A client's value that cannot be served: its field, the value, the allowed values; each cut at a length."""

    def __init__(self, name: str, value: object, reason: str) -> None:
        name, reason = _cut(name, MOST_NAMED), _cut(reason, MOST_REASON)
        super().__init__(f"{name} is {_cut(repr(value), MOST_SHOWN)}: {reason}")
        self.field, self.value, self.reason = name, value, reason

    def of(self, name: str) -> "InvalidRequest":
        """Returns the same error of another field, where only the caller knows the client's name of it."""
        return InvalidRequest(name, self.value, self.reason)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def require(allowed: object, name: str, value: object, reason: str) -> None:
    """Raises InvalidRequest unless the value is allowed."""
    if not allowed:
        raise InvalidRequest(name, value, reason)


def require_several(name: str, values: object, form: str) -> None:
    """Refuses a single text, which would be read as its characters, and collections without an order."""
    require(isinstance(values, Sequence) and not isinstance(values, str), name, values, f"must be several: {form}")
