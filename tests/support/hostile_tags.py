"""Draws hostile structural tags, for `tests.support.hostile_grammars`."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.hostile_texts import odd_text, scratched, size

BEGINS = ("<", "<f", "<f=", "<f=a", "[", "[[", "{", "\n", "a", "aa", "aab", "<|end|>", "</f>", "\x00", "é", '"', "/")
KEYS = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar", "any_text": ""}


def structural_tags(chance: random.Random, contents: Mapping[str, Callable[[random.Random], str]]) -> str:
    """Returns JSON of structural tags in either form. contents: what makes each kind of content, as text."""
    count = size(chance, 6, 300)
    triggers = [_begin(chance) for _ in range(size(chance, 4, 70))]
    fits = chance.random() < 0.8  # each trigger begins a tag, and no begin is the beginning of another
    count = max(count, len(triggers)) if fits else count
    fronts = [f"{triggers[i % len(triggers)]}{i}>" if fits else _front(chance, triggers) for i in range(count)]
    tags = [_tag(chance, front, contents) for front in fronts]
    if chance.random() < 0.3:
        tags = [_older(tag) for tag in tags]
        made: Any = {"type": "structural_tag", "structures": tags, "triggers": triggers}
    else:
        flags = {key: True for key in ("at_least_one", "stop_after_first") if chance.random() < 0.5}
        made = {"format": {"type": "triggered_tags", "triggers": triggers, "tags": tags, **flags}}
    if chance.random() < 0.15:
        _spoil(chance, made)
    text = json.dumps(made, ensure_ascii=chance.random() < 0.5)
    return scratched(chance, text) if chance.random() < 0.05 else text


def _begin(chance: random.Random) -> str:
    return chance.choice(BEGINS) if chance.random() < 0.9 else odd_text(chance) * size(chance, 5, 2000)


def _front(chance: random.Random, triggers: list[str]) -> str:
    return chance.choice(triggers) + chance.choice(("", "", ">", *map(str, range(30)), odd_text(chance)))


def _tag(chance: random.Random, begin: str, contents: Mapping[str, Callable[[random.Random], str]]) -> dict[str, Any]:
    kind = chance.choice([*KEYS])
    content = {"type": kind} | ({KEYS[kind]: contents[kind](chance)} if KEYS[kind] else {})
    return {"begin": begin, "content": content, "end": _begin(chance)}


def _older(tag: dict[str, Any]) -> dict[str, Any]:
    schema = tag["content"].get("json_schema", {"type": "integer"})
    return {"begin": tag["begin"], "schema": schema, "end": tag["end"]}


def _spoil(chance: random.Random, node: Any) -> None:
    """Changes one value anywhere, in place."""
    inner = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    if not inner:
        return
    key, value = chance.choice(inner)
    if isinstance(value, dict | list) and value and chance.random() < 0.7:
        _spoil(chance, value)
    else:
        node[key] = chance.choice((None, "", 0, True, [], {}, [[]], {"type": "tag"}, "\ud800", odd_text(chance)))
