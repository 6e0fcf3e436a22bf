"""State of a `quire chat`: its turns, its options, and the next request. Knows neither terminal nor server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from rpc.client.specs import Prompt, spec_of
from rpc.frontend.errors import RequestFailed
from rpc.image_files import read_image
from rpc.services.convert import spec_from

HELP = """\
/image FILE         send a PNG or JPEG with the next message
/system TEXT        a system message before the conversation; without TEXT, none
/set NAME VALUE     an option of requests (/set temperature 0.3); without VALUE, the server's own; /set alone shows them
/seed NUMBER        the same answer to the same words; without NUMBER, another one each time
/clear              begin again
/quit               or Ctrl-D: end. Ctrl-C stops an answer. // begins a message with /"""


class NotThatWay(ValueError):
    """A command that cannot be done; its message says why."""


@dataclass(slots=True)
class Conversation:
    """A conversation with a model.

    Attributes:
        plain: Whether both write one text in turn, in place of a conversation.
        kinds: Dataclasses of the options.
        options: Options by field; None leaves a value to the server.
        over: Whether /quit ended the conversation.

    Raises:
        NotThatWay: An option is wrong.
    """

    plain: bool
    kinds: tuple[type, ...]
    options: dict[str, Any]
    over: bool = False
    _system: str = ""
    _turns: list[dict[str, Any]] = field(default_factory=list)
    _text: str = ""
    _images: list[bytes] = field(default_factory=list)
    _next_images: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Checks the options. Raises NotThatWay."""
        _check(self.options)

    def ask(self, words: str) -> tuple[Prompt, list[bytes]]:
        """Appends the user's words, and returns the prompt and the images beside it.

        Call `answered` or `withdrawn` next.
        """
        if self.plain:
            # A typed line is a line of its own on the screen, so it is one in the text.
            text = f"{self._text}\n{words}" if self._text else words
            self._turns = [{"role": "user", "content": [text]}]
            return text, [*self._images, *self._next_images]
        self._turns.append({"role": "user", "content": [*self._next_images, words]})
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns], []

    def answered(self, answer: str) -> None:
        """Appends the model's answer, or the part of it that came."""
        if self.plain:
            self._text = self._turns.pop()["content"][0] + answer
            self._images += self._next_images
        else:
            self._turns.append({"role": "assistant", "content": answer})
        self._next_images = []

    def withdrawn(self) -> None:
        """Removes the newest words, which got no answer. Their images go with the next ones."""
        self._turns.pop()

    def command(self, line: str) -> str:
        """Runs a command, a line that begins with /; returns text for the person. Raises NotThatWay, OSError."""
        name, _, rest = line.partition(" ")
        known: Mapping[str, Callable[[str], str]] = {
            "/help": lambda _: HELP,
            "/image": self._image,
            "/system": self._set_system,
            "/set": self._set,
            "/seed": lambda value: self._set(f"seed {value}"),
            "/clear": self._clear,
            "/quit": self._quit,
        }
        if name not in known:
            raise NotThatWay(f"there is no {name}; /help shows the commands")
        return known[name](rest.strip())

    def _image(self, path: str) -> str:
        if not path:
            raise NotThatWay("which file? /image FILE")
        try:
            image = read_image(Path(path).expanduser())
        except ValueError as error:
            raise NotThatWay(str(error)) from None
        self._next_images.append(image)
        beside = "; the text has the model's marker in its place" if self.plain else ""
        return f"{path} goes with the next message{beside}"

    def _set_system(self, text: str) -> str:
        if self.plain:
            raise NotThatWay("plain text has no system message")
        self._system = text
        return "from the next message on" if text else "the conversation has no system message"

    def _clear(self, _rest: str) -> str:
        self._turns, self._text, self._images, self._next_images = [], "", [], []
        return "begun again"

    def _quit(self, _rest: str) -> str:
        self.over = True
        return ""

    def _set(self, rest: str) -> str:
        name, _, text = rest.partition(" ")
        if not name:
            return "\n".join(f"{key} {_shown(value)}" for key, value in self.options.items())
        if name not in self.options:
            raise NotThatWay(f"there is no option {name}; there are {', '.join(self.options)}")
        text = text.strip()
        value = _parse(self._kind(name), name, text) if text else None
        _check(self.options | {name: value})
        self.options[name] = value
        return f"{name} {_shown(self.options[name])}"

    def _kind(self, name: str) -> type:
        """Returns the type of an option: float, int or list."""
        for kind in self.kinds:
            if name in {option.name for option in fields(kind)}:
                (found,) = (part for part in get_args(get_type_hints(kind)[name]) if part is not NoneType)
                return found  # type: ignore[no-any-return]
        raise KeyError(name)


def _shown(value: Any) -> str:
    return "as the server has it" if value is None else repr(value)


def _check(options: Mapping[str, Any]) -> None:
    """Checks options like a server, but for limits of its model. Raises NotThatWay."""
    try:
        spec_from(spec_of("", **options))
    except (RequestFailed, ValueError, TypeError) as error:
        raise NotThatWay(str(error)) from None


def _parse(kind: type, name: str, text: str) -> Any:
    """Parses an option's value. Raises NotThatWay."""
    if kind not in (int, float):
        return [text]
    try:
        return kind(text)
    except ValueError:
        raise NotThatWay(f"{name} takes a {'whole ' if kind is int else ''}number, not {text!r:.60}") from None
