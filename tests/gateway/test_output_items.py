"""Items of a response keep the order of the output, however its parts are grouped."""

from typing import Any

from rpc.gateway.answers import Piece
from rpc.gateway.chat import whole_calls
from rpc.gateway.output_items import OutputItems


def part(arguments: str, name: str = "", index: int = 0) -> dict[str, Any]:
    if not name:
        return {"index": index, "function": {"arguments": arguments}}
    return {"index": index, "id": f"id{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def items(*pieces: Piece) -> list[dict[str, Any]]:
    made = OutputItems()
    events = [event for piece in pieces for event in made.add(piece)]
    assert [fields["output_index"] for _, fields in events] == sorted(fields["output_index"] for _, fields in events)
    return made.done


def test_the_end_of_a_call_comes_before_text_of_the_same_piece() -> None:
    first = Piece(0, "Hm. ", reasoning="So.", calls=(part('{"a": ', "f"),))
    last = Piece(0, "Done.", finish="tool_calls", calls=(part("1}"),))
    made = items(first, last)
    assert [item["type"] for item in made] == ["reasoning", "message", "function_call", "message"]
    assert made[2]["arguments"] == '{"a": 1}'
    assert made[3]["content"][0]["text"] == "Done."
    assert {item["status"] for item in made} == {"completed"}


def test_a_call_and_the_next_one_in_one_piece() -> None:
    made = items(
        Piece(0, "", calls=(part("{", "f"),)), Piece(0, "", finish="length", calls=(part("}"), part("{", "g", 1)))
    )
    assert [(item["name"], item["arguments"], item["status"]) for item in made] == [
        ("f", "{}", "completed"),
        ("g", "{", "incomplete"),
    ]


def test_the_tail_of_a_call_without_its_beginning_is_no_error() -> None:
    assert items(Piece(0, "a", calls=(part("1}"),), finish="stop"))[0]["content"][0]["text"] == "a"
    assert whole_calls([part("1}")]) == [{"id": "", "type": "function", "function": {"name": "", "arguments": "1}"}}]


def test_the_end_of_a_call_comes_before_reasoning_of_the_same_piece() -> None:
    made = items(Piece(0, "", calls=(part('{"a"', "f"),)), Piece(0, "", reasoning="So.", calls=(part(": 1}"),)))
    assert [item["type"] for item in made] == ["function_call"]
    assert made[0]["arguments"] == '{"a": 1}'
