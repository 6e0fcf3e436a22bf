"""The requests of a load: as many, as long and as alike as asked, and the same ones each time."""

import re
from pathlib import Path

import pytest

from rpc.loadgen.corpus import Corpus, plays
from rpc.loadgen.plan import RequestPlan
from rpc.loadgen.settings import LoadSettings
from rpc.loadgen.wire import LoadRequest

IDS, WORDS = Corpus(range(5000)), Corpus(plays().split(), 1.5)


def test_prompts_have_their_lengths_and_share_what_they_should() -> None:
    drawn = {"requests": 40, "input_tokens": "50-60", "output_tokens": "3-9", "shared_prefix": 20}
    settings = LoadSettings(seed=5, prompt_seed=1, **drawn)
    made = list(RequestPlan(settings, IDS, 100).requests())
    assert [one.number for one in made] == list(range(40))
    assert {len(one.prompt) for one in made} == set(range(50, 61))
    assert all(len(one.prompt) == one.tokens for one in made)
    assert {one.output for one in made} == set(range(3, 10))
    assert len({tuple(one.prompt[:20]) for one in made}) == 1
    assert len({one.prompt[20] for one in made}) > 35
    assert {one.shared for one in made} == {20}
    assert made == list(RequestPlan(settings, IDS, 100).requests())
    other = list(RequestPlan(LoadSettings(seed=6, prompt_seed=1, **drawn), IDS, None).requests())
    assert [one.tokens for one in made] != [one.tokens for one in other]


def sizes(made: list[LoadRequest]) -> list[tuple[int, int, float]]:
    return [(one.tokens, one.output, one.at) for one in made]


@pytest.mark.parametrize("load", [{"rate": 3.0, "input_tokens": "30-60"}, {"trace": "mooncake"}])
def test_text_differs_from_run_to_run_and_nothing_else_does(load: dict) -> None:
    """Else a second run measures what the first one left in the server's prefix cache."""
    one, two = (
        RequestPlan(LoadSettings(requests=9, **load), IDS, 900),
        RequestPlan(LoadSettings(requests=9, **load), IDS, 900),
    )
    first, second = list(one.requests()), list(two.requests())
    assert sizes(first) == sizes(second)
    assert not {tuple(request.prompt[:16]) for request in first} & {tuple(request.prompt[:16]) for request in second}
    again = RequestPlan(LoadSettings(requests=9, prompt_seed=one.prompt_seed, **load), IDS, 900)
    assert list(again.requests()) == first


def test_no_two_of_many_requests_begin_alike() -> None:
    """Though the text has fewer places to begin at than there are requests."""
    made = RequestPlan(LoadSettings(requests=3000, input_tokens="20"), Corpus(range(1000)), None).requests()
    assert len({tuple(one.prompt[:16]) for one in made}) == 3000


def test_warm_up_has_other_text_but_the_shared_one() -> None:
    plan = RequestPlan(LoadSettings(requests=5, warm_up=3, input_tokens="30", shared_prefix=10), IDS, None)
    warm, made = list(plan.warm_up()), list(plan.requests())
    assert (len(warm), len(made), plan.total) == (3, 5, 5)
    assert {tuple(one.prompt[:10]) for one in warm} == {tuple(one.prompt[:10]) for one in made}
    assert not {tuple(one.prompt[10:]) for one in warm} & {tuple(one.prompt[10:]) for one in made}
    assert not {one.number for one in warm} & {one.number for one in made}


def test_text_is_cut_at_words_and_goes_round() -> None:
    text = WORDS.prompt([(10**18, 30)])
    assert isinstance(text, str)
    assert len(text.split()) == 20
    assert not WORDS.exact
    assert Corpus([1, 2, 3]).prompt([(2 + 3 * 1, 8)]) == [3, 2, 1, 1, 2, 3, 1, 2]


def test_blocks_of_a_trace_are_equal_text_where_their_ids_are(tmp_path: Path) -> None:
    row = '{"timestamp": %d, "input_length": %d, "output_length": 10, "hash_ids": %s}\n'
    file = tmp_path / "a.jsonl"
    file.write_text(row % (0, 1100, [7, 8, 9]) + row % (1000, 1100, [7, 8, 10]) + row % (2000, 513, [1, 2]))
    settings = LoadSettings(trace=str(file), speed=2)
    for context, block in ((None, 512), (556, 256)):
        plan = RequestPlan(settings, Corpus(range(10**6)), context)
        one, two, three = plan.requests()
        assert [request.at for request in (one, two, three)] == [0, 0.5, 1]
        for request in (one, two, three):
            assert len(request.prompt) == request.tokens
        alike = next(i for i, (a, b) in enumerate(zip(one.prompt, two.prompt, strict=True)) if a != b)
        assert alike == 2 * int(512 * plan.shrink)
        assert abs(alike - 2 * block) <= 4
        assert three.prompt[0] != one.prompt[0]
        assert (one.shared, two.shared, three.shared) == (0, alike, 0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"concurrency": 2, "rate": 1.0}, "--concurrency and --rate are different loads"),
        ({"rate": 0.0}, "--rate is 0.0, must be above 0"),
        ({"trace": "mooncake", "speed": float("nan")}, "--speed is nan"),
        ({"duration": -1.0}, "--duration is -1.0"),
        ({"shared_prefix": 200}, "--shared-prefix 200 is longer than the shortest prompt, 128"),
        ({"shared_prefix": 2, "trace": "mooncake"}, "--shared-prefix is not for --trace"),
        ({"input_tokens": "5000", "trace": "mooncake"}, "--input-tokens is not for --trace"),
        ({"output_tokens": "64", "trace": "mooncake"}, "--output-tokens is not for --trace"),
        ({"seed": 0, "trace": "mooncake"}, "--seed is not for --trace"),
        ({"concurrency": 2, "burstiness": 1.0, "speed": 30.0}, "--burstiness is for --rate, which is not given"),
        ({"burstiness": 0.1, "trace": "mooncake"}, "--burstiness is for --rate, which is not given"),
        ({"speed": 1.0, "rate": 3.0}, "--speed is for --trace, which is not given"),
        ({"context": 1024}, "--context is for --trace, which is not given"),
        ({"input_tokens": ""}, "--input-tokens '' must be"),
        ({"output_tokens": "5-2"}, "--output-tokens '5-2' must be"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(flags: dict, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        LoadSettings(**flags)


def test_what_is_in_force_is_known_and_nothing_else() -> None:
    closed, rate, trace = LoadSettings(), LoadSettings(rate=3.0), LoadSettings(trace="mooncake", speed=2.0)
    names = ("concurrency", "requests", "burstiness", "speed", "input_tokens", "output_tokens", "shared_prefix", "seed")
    found = [[one.in_force()[name] for name in names] for one in (closed, rate, trace)]
    assert found == [
        [8, 100, None, None, "128", "64", 0, 0],
        [None, 100, 1.0, None, "128", "64", 0, 0],
        [None, None, None, 2.0, None, None, None, None],
    ]


def test_requests_that_cannot_fit_are_refused_before_the_load() -> None:
    with pytest.raises(ValueError, match="do not fit a context of 191"):
        RequestPlan(LoadSettings(), IDS, 191)
    assert RequestPlan(LoadSettings(), IDS, 192).total == 100
    assert RequestPlan(LoadSettings(duration=3.0), IDS, 192).total is None
    assert RequestPlan(LoadSettings(trace="azure-conv"), IDS, 1024).total == 200
    assert (
        max(one.tokens + one.output for one in RequestPlan(LoadSettings(trace="mooncake"), IDS, 1024).requests())
        <= 1024
    )
