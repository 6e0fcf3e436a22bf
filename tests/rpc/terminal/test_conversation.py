"""Requests of `quire chat`, by what was typed; without server or terminal."""

from dataclasses import asdict
from pathlib import Path

import pytest
from quire.v1 import generation_service_pb2 as pb

from rpc.cli.parameters import SamplingOptions, StoppingOptions
from rpc.client.specs import spec_of
from rpc.terminal.conversation import Conversation, NotThatWay
from rpc.terminal.talk import HARMLESS, ChatAnswer

KINDS = SamplingOptions, StoppingOptions


def begun(plain: bool = False) -> Conversation:
    return Conversation(plain, KINDS, {name: value for kind in KINDS for name, value in asdict(kind()).items()})


def user(words: str) -> dict[str, object]:
    return {"role": "user", "content": [words]}


def test_turns_follow_each_other() -> None:
    talk = begun()
    assert talk.ask("a") == ([user("a")], [])
    talk.answered("b")
    talk.command("/system Be kind")
    turns, _ = talk.ask("c")
    system, answer = {"role": "system", "content": "Be kind"}, {"role": "assistant", "content": "b"}
    assert turns == [system, user("a"), answer, user("c")]
    talk.withdrawn()
    talk.command("/system")
    assert talk.ask("d")[0] == [user("a"), answer, user("d")]
    talk.answered("e")
    talk.command("/clear")
    assert talk.ask("f")[0] == [user("f")]


def test_plain_text_is_what_the_screen_shows() -> None:
    talk = begun(plain=True)
    assert talk.ask("ROMEO:") == ("ROMEO:", [])
    talk.answered(" Ay me!")
    assert talk.ask("JULIET:")[0] == "ROMEO: Ay me!\nJULIET:"
    talk.withdrawn()
    assert talk.ask("NURSE:")[0] == "ROMEO: Ay me!\nNURSE:"
    with pytest.raises(NotThatWay, match="plain text has no system message"):
        talk.command("/system x")


def test_images_go_with_the_next_message_and_stay_in_it(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(b"PNG")
    talk = begun()
    assert "goes with the next message" in talk.command(f"/image {tmp_path / 'a b.png'}")
    talk.ask("what?")
    talk.withdrawn()  # the server was full: the image is not lost
    assert talk.ask("what?")[0] == [{"role": "user", "content": [b"PNG", "what?"]}]
    talk.answered("a cat")
    turns, _ = talk.ask("sure?")
    assert [turn["content"] for turn in turns] == [[b"PNG", "what?"], "a cat", ["sure?"]]  # type: ignore[index]
    plain = begun(plain=True)
    plain.command(f"/image {tmp_path / 'a b.png'}")
    assert plain.ask("<image>what?")[1] == [b"PNG"]
    plain.answered("a cat")
    assert plain.ask("sure?")[1] == [b"PNG"]
    with pytest.raises(NotThatWay, match="no regular file"):
        talk.command(f"/image {tmp_path}")
    with pytest.raises(FileNotFoundError):
        talk.command(f"/image {tmp_path / 'none'}")


def test_options_are_fields_of_the_api() -> None:
    talk = begun()
    for line in ("/set temperature 0.3", "/set max_tokens 20", "/set stop one two", "/seed 7"):
        talk.command(line)
    given = {name: value for name, value in talk.options.items() if value is not None}
    assert given == {"temperature": 0.3, "max_tokens": 20, "stop": ["one two"], "seed": 7}
    spec = spec_of("x", **talk.options)
    assert (spec.stopping.max_tokens, spec.sampling.seed) == (20, 7)
    assert "temperature 0.3" in talk.command("/set")
    assert talk.command("/seed") == "seed as the server has it"
    assert talk.options["seed"] is None
    for line, why in (
        ("/set heat 1", "there is no option heat"),
        ("/set top_k 1.5", "top_k takes a whole number, not '1.5'"),
        ("/set temperature hot", "temperature takes a number"),
        ("/set temperature nan", r"sampling.temperature is nan: must be in \[0, 2\]"),
        ("/set temperature 99", r"sampling.temperature is 99.0: must be in \[0, 2\]"),
        ("/set repetition_penalty 1e300", "sampling.repetition_penalty is inf"),
        ("/set min_tokens 21", "stopping.min_tokens is 21: must be at most max_tokens, which is 20"),
        ("/set max_tokens 4294967296", "max_tokens: .*4294967296"),
        ("/set top_k -1", "top_k: .*-1"),
        ("/seed 18446744073709551616", "seed: .*18446744073709551616"),
        ("/what", "there is no /what"),
        ("/image", "which file"),
    ):
        with pytest.raises(NotThatWay, match=why):
            talk.command(line)
    assert {name: value for name, value in talk.options.items() if value is not None} == {
        name: given[name] for name in ("temperature", "max_tokens", "stop")
    }
    talk.command("/quit")
    assert talk.over


def test_options_that_no_request_can_have_are_refused_at_the_start() -> None:
    with pytest.raises(NotThatWay, match=r"sampling.top_p is 7.0"):
        Conversation(False, KINDS, {"top_p": 7.0})


def test_an_answer_s_rate_is_that_of_the_tokens_after_the_first() -> None:
    answer = ChatAnswer(began=10.0)
    first = pb.StreamGenerateResponse(prompt_info=pb.PromptInfo(seed=3))
    first.deltas.add(text="a", token_count=1)
    last = pb.StreamGenerateResponse(usage=pb.Usage(prompt_tokens=20, cached_prompt_tokens=16, completion_tokens=5))
    last.deltas.add(text="bc", token_count=4, finish_reason=pb.FINISH_REASON_LENGTH)
    assert answer.add_message(first, 10.25) == ("", "a")
    assert answer.add_message(last, 12.25) == ("", "bc")
    assert answer.text == "abc"
    said = "20 prompt tokens (16 cached), 5 generated, 2.0 tokens/s, first after 250 ms, length, seed 3"
    assert answer.summary() == said


def test_what_a_terminal_would_obey_is_shown_as_a_mark() -> None:
    assert "a\x1b[2J\rb\x9b\x07\n\té".translate(HARMLESS) == "a�[2J�b��\n\té"
