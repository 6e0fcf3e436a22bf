"""Texts with structural tags: a plain reader of them, and random writers that begin tags."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
from llguidance import LLMatcher

END_TOKEN = 256


class NotTagged(Exception):
    """A text is none of a structural tag's."""


@dataclass(frozen=True)
class Tagged:
    """Structural tags as a test states them.

    Attributes:
        triggers: Triggers.
        tags: Begin, content and end of each. A content is a schema (dict), a pattern (str), or None for any text.
        at_least_one: As in the newer form.
        stop_after_first: As in the newer form.
        grammars: Grammars in place of patterns, by the pattern that says the same.
    """

    triggers: tuple[str, ...]
    tags: tuple[tuple[str, Any, str], ...]
    at_least_one: bool = False
    stop_after_first: bool = False
    grammars: tuple[tuple[str, str], ...] = ()

    def newer(self) -> dict[str, Any]:
        """Returns them in the newer form."""
        tags = [
            {"type": "tag", "begin": begin, "content": self._content(content), "end": end}
            for begin, content, end in self.tags
        ]
        flags = {"at_least_one": self.at_least_one, "stop_after_first": self.stop_after_first}
        made = {"type": "triggered_tags", "triggers": list(self.triggers), "tags": tags, **flags}
        return {"type": "structural_tag", "format": made}

    def older(self) -> dict[str, Any]:
        """Returns them in the older form, which has schemas alone."""
        tags = [{"begin": begin, "schema": content, "end": end} for begin, content, end in self.tags]
        return {"type": "structural_tag", "structures": tags, "triggers": list(self.triggers)}

    def _content(self, content: Any) -> dict[str, Any]:
        if content is None:
            return {"type": "any_text"}
        if isinstance(content, dict):
            return {"type": "json_schema", "json_schema": content}
        if content in dict(self.grammars):
            return {"type": "grammar", "grammar": dict(self.grammars)[content]}
        return {"type": "regex", "pattern": content}

    def read(self, text: str) -> list[tuple[str, str]]:
        """Reads a whole output. Returns begin and content of each tag.

        Raises:
            NotTagged: A trigger is followed by no tag, a content is not valid, or the output breaks off.
        """
        found, at = list[tuple[str, str]](), 0
        while True:
            starts = [(text.find(t, at) + len(t), text.find(t, at)) for t in self.triggers if text.find(t, at) >= 0]
            if self.at_least_one and not found:
                starts = [(at, at)]
            if not starts:
                return found
            if self.stop_after_first and found:
                raise NotTagged("more than one")
            begin, content, at = self._tag(text, min(starts)[1])
            found.append((begin, content))
            if self.stop_after_first and at < len(text):
                raise NotTagged("text behind it")

    def _tag(self, text: str, at: int) -> tuple[str, str, int]:
        """Reads a tag. Returns its begin and content, and where it ends."""
        for begin, content, end in self.tags:
            if text.startswith(begin, at):
                start = at + len(begin)
                stop = self._stop(text, start, content, end)
                return begin, text[start:stop], stop + len(end)
        raise NotTagged(f"no tag at {text[at : at + 20]!r}")

    def _stop(self, text: str, start: int, content: Any, end: str) -> int:
        if isinstance(content, dict):
            try:
                value, stop = json.JSONDecoder().raw_decode(text, start)
                jsonschema.validate(value, content)
            except (ValueError, jsonschema.ValidationError) as error:
                raise NotTagged(str(error)) from None
            if text.startswith(end, stop):
                return stop
            raise NotTagged("no end behind a value")
        stop = text.find(end, start)
        while stop >= 0:
            if content is None or re.fullmatch(content, text[start:stop]):
                return stop
            stop = text.find(end, stop + 1)
        raise NotTagged("no end")

    def scripts(self) -> list[bytes]:
        """Returns texts that a writer begins again and again."""
        texts = [*self.triggers, *(begin for begin, _, _ in self.tags), *(end for _, _, end in self.tags)]
        return [text.encode() for text in texts]


class Writer:
    """Chooses random tokens, of which many follow a script."""

    def __init__(self, tagged: Tagged, seed: int) -> None:
        self._scripts, self.rng = tagged.scripts(), random.Random(seed)
        self._script: Iterator[int] = iter(())

    def token(self, matcher: LLMatcher) -> int:
        """Returns a token that may follow."""
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        allowed = [t for t in range(END_TOKEN + 1) if mask >> t & 1]
        assert allowed
        wanted = next(self._script, None)
        if wanted is None and self.rng.random() < 0.3:
            self._script = iter(self.rng.choice(self._scripts))
            wanted = next(self._script)
        if wanted in allowed:
            return wanted or 0
        self._script = iter(())
        plain = [t for t in allowed if 32 <= t < 127] or allowed
        return self.rng.choice(plain if self.rng.random() < 0.8 else allowed)
