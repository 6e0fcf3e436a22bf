"""Output of a model in a conversation, taken apart."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CallDelta:
    """New part of a tool call.

    Attributes:
        index: Number of the call in the message, from 0.
        name: Name of the tool, in the call's first part; else "".
        call_id: Id of the call, in its first part; else "".
        arguments: New text of the arguments, which is JSON once the call is whole.
    """

    index: int
    name: str = ""
    call_id: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """New output.

    Attributes:
        content: Text that is neither reasoning nor a call.
        reasoning: Reasoning.
        calls: Parts of calls in their order, at most one of each.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def begin_call(self, index: int, name: str, call_id: str) -> None:
        """Adds the beginning of a call."""
        self.calls.append(CallDelta(index, name, call_id))

    def add_arguments(self, index: int, text: str) -> None:
        """Adds text of the arguments of the newest call."""
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallDelta(index))
        self.calls[-1].arguments += text


def add_calls(calls: list[CallDelta], new: list[CallDelta]) -> None:
    """Adds parts of calls to earlier ones, of each call one."""
    for part in new:
        if calls and calls[-1].index == part.index:
            calls[-1].arguments += part.arguments
        else:
            calls.append(part)
