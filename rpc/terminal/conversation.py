"""What has been said in `quire chat`, and what is asked of the server next. Knows neither terminal nor server."""

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
/system TEXT        what the model is told before the conversation; without TEXT, nothing
/set NAME VALUE     an option of requests (/set temperature 0.3); without VALUE, the server's own; /set alone shows them
/seed NUMBER        the same answer to the same words; without NUMBER, another one each time
/clear              begin again
/quit               or Ctrl-D: end. Ctrl-C stops an answer. // begins a message with /"""


class NotThatWay(ValueError):
    """A command that cannot be done, and why."""


@dataclass(slots=True)
class Conversation:
    """plain: no conversation but one text, which both write in turn. kinds: classes of options; options: their fields
    by name, None where the server decides.
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
        """Raises NotThatWay."""
        _check(self.options)

    def ask(self, words: str) -> tuple[Prompt, list[bytes]]:
        """The prompt and the images that stand beside it, with these words as the newest. `answered` or `withdrawn`
        comes next.
        """
        if self.plain:
            # A line that was typed stands on a line of its own on the screen; so it does in the text.
            text = f"{self._text}\n{words}" if self._text else words
            self._turns = [{"role": "user", "content": [text]}]
            return text, [*self._images, *self._next_images]
        self._turns.append({"role": "user", "content": [*self._next_images, words]})
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns], []

    def answered(self, answer: str) -> None:
        """With all of this, or with a part of what it would have been."""
        if self.plain:
            self._text = self._turns.pop()["content"][0] + answer
            self._images += self._next_images
        else:
            self._turns.append({"role": "assistant", "content": answer})
        self._next_images = []

    def withdrawn(self) -> None:
        """There was no answer: the words are as if they had never been said. The images wait for the next ones."""
        self._turns.pop()

    def command(self, line: str) -> str:
        """Does what a line with / says; what there is to say of it. Raises NotThatWay, OSError."""
        name, _, rest = line.partition(" ")
        known: Mapping[str, Callable[[str], str]] = {
            "/help": lambda _: HELP,
            "/image": self._image,
            "/system": self._tell_system,
            "/set": self._set,
            "/seed": lambda value: self._set(f"seed {value}"),
            "/clear": self._clear,
            "/quit": self._quit,
        }
        if name not in known:
            raise NotThatWay(f"there is no {name}; /help shows what there is")
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

    def _tell_system(self, text: str) -> str:
        if self.plain:
            raise NotThatWay("plain text has no system message")
        self._system = text
        return "from the next message on" if text else "the model is told nothing before the conversation"

    def _clear(self, _rest: str) -> str:
        self._turns, self._text, self._images, self._next_images = [], "", [], []
        return "begun again"

    def _quit(self, _rest: str) -> str:
        self.over = True
        return ""

    def _set(self, rest: str) -> str:
        name, _, given = rest.partition(" ")
        if not name:
            return "\n".join(f"{key} {_shown(value)}" for key, value in self.options.items())
        if name not in self.options:
            raise NotThatWay(f"there is no option {name}; there are {', '.join(self.options)}")
        given = given.strip()
        value = _read(self._kind(name), name, given) if given else None
        _check(self.options | {name: value})
        self.options[name] = value
        return f"{name} {_shown(self.options[name])}"

    def _kind(self, name: str) -> type:
        """float, int or list."""
        for kind in self.kinds:
            if name in {option.name for option in fields(kind)}:
                (found,) = (part for part in get_args(get_type_hints(kind)[name]) if part is not NoneType)
                return found  # type: ignore[no-any-return]
        raise KeyError(name)


def _shown(value: Any) -> str:
    return "as the server has it" if value is None else repr(value)


def _check(options: Mapping[str, Any]) -> None:
    """As a server will; its limits of this model it knows alone. Raises NotThatWay."""
    try:
        spec_from(spec_of("", **options))
    except (RequestFailed, ValueError, TypeError) as error:
        raise NotThatWay(str(error)) from None


def _read(kind: type, name: str, given: str) -> Any:
    """Raises NotThatWay."""
    if kind not in (int, float):
        return [given]
    try:
        return kind(given)
    except ValueError:
        raise NotThatWay(f"{name} takes a {'whole ' if kind is int else ''}number, not {given!r:.60}") from None
