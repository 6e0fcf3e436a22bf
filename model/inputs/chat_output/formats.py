"""Forms in which models write tool calls and reasoning, as data.

All texts are literals. Where the grammar writes whitespace, the parser takes any whitespace or none, since models vary
it. A literal may have special tokens of the model: see `model.inputs.chat_output.marks`.
"""

from dataclasses import dataclass
from enum import Enum


class Arguments(Enum):
    """Forms of a call's arguments.

    JSON: an object. TAGGED: each in tags of its own (`ParameterTags`), texts as they are and other values as JSON.
    PYTHON: f(a=1, b="x"). GEMMA: f{a:1,b:<|"|>x<|"|>}.
    """

    JSON, TAGGED, PYTHON, GEMMA = range(4)


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """Literals around an argument.

    Attributes:
        begin: Before its name.
        named: Between name and value.
        end: Behind the value.
        typed: Where not "", `named` is in two parts with "true" between them if the value is a text, else "false";
            this is the second part.
        indented: A value begins and ends with a new line of its own.
    """

    begin: str
    named: str
    end: str
    typed: str = ""
    indented: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A family's form of tool calls.

    Attributes:
        name: Name in `--tool-format`.
        trigger: Text that begins the calls. Whatever else a model writes does not have it.
        opening: Before the first call. `opening + begin` begins with the trigger.
        begin: Before a call's name; with `keys`, before its JSON object.
        named: Between name and arguments; not with `keys`.
        end: Behind the arguments; with `keys`, behind the JSON object.
        between: Between two calls.
        closing: Behind the last call.
        arguments: Form of the arguments.
        keys: Keys of name and arguments, where a call is one JSON object with both.
        tags: Literals of TAGGED arguments.
        quote: Text that begins and ends a text, in GEMMA arguments.
        at_start: The trigger counts only where the content begins.
        other_triggers: Other texts that begin a call, in place of `opening + begin`. A grammar does not write them.
        aliases: Other texts in place of the trigger, likewise.
        bare: Beginning and end of a call of an offered tool where a model leaves out what is around them in `begin` and
            `end`, likewise; () for none.
        skips_to: The parser reads anything between the name and this text, in place of `named`.
        call_id: Form of the call's id where the model writes one, with {name} and {id}.
        id_begin: Between name and id.
        id_pattern: Regular expression of the {id} that the model writes.
        id_length: Characters of an id that the server makes; 0 for any.
        one: The model makes one call at a time.
    """

    name: str
    trigger: str
    opening: str = ""
    begin: str
    named: str = ""
    end: str
    between: str = ""
    closing: str = ""
    arguments: Arguments = Arguments.JSON
    keys: tuple[str, str] | None = None
    tags: ParameterTags | None = None
    quote: str = ""
    at_start: bool = False
    other_triggers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    skips_to: str = ""
    call_id: str = ""
    id_begin: str = ""
    id_pattern: str = ""
    id_length: int = 0
    one: bool = False

    @property
    def triggers(self) -> tuple[str, ...]:
        """All texts that begin calls."""
        return (self.trigger, *self.other_triggers, *self.aliases, *self.bare[:1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """A family's form of reasoning.

    Attributes:
        name: Name in `--reasoning-format`.
        begin: Before the reasoning. A template may have written it already.
        end: Behind the reasoning.
        anywhere: Reasoning may also follow content.
        behind: Behind `end`, before anything else.
        content: Before content.
        dropped: Texts around content that are no content.
        answer: Texts before and behind all of the content, likewise; () for none.
    """

    name: str
    begin: str
    end: str
    anywhere: bool = False
    behind: str = ""
    content: str = ""
    dropped: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
