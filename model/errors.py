"""Errors of a model directory, and of the processes that run a model together. Imports no torch."""

import reprlib

MOST_SHOWN = 200
"""Characters of a name or value of a checkpoint in a message."""

LONGEST_MESSAGE = 2000
"""Characters of a message. Longer ones lose their middle: the place stands in front, the remedy at the end."""

_END = 500  # characters of the end that a cut message keeps


class _Short(reprlib.Repr):
    """`repr` that looks at no more of a value than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist = 4, 8, 8
        self.maxstring = self.maxlong = self.maxother = MOST_SHOWN


def shown(value: object) -> str:
    """Formats a value of a checkpoint's file for a message, cut at 200 characters."""
    text = _Short().repr(value)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def named(name: str) -> str:
    """Formats a name that a checkpoint gives (tensor, file) for a message: unquoted, cut at 200 characters."""
    return name if len(name) <= MOST_SHOWN else name[: MOST_SHOWN - 3] + "..."


class CheckpointError(ValueError):
    """A model directory that cannot be served. The message names file and tensor, and the remedy.

    Names and values come from untrusted files. Control characters are escaped, so that no terminal obeys them. A
    message has at most `LONGEST_MESSAGE` characters.
    """

    def __init__(self, message: str) -> None:
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE - _END - 5]} ... {message[-_END:]}"
        escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__(escaped[:LONGEST_MESSAGE])


class RequestFault(Exception):
    """Ends one request while it is computed. Its text is for the client."""


class RankLost(RuntimeError):
    """A rank of a tensor-parallel group has ended or hangs. Names rank and reason.

    The group computes no more.
    """
