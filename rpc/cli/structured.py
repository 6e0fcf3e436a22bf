"""Flags that constrain the output of `quire generate`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StructuredOptions:
    """At most one of them is given."""

    json_schema: Path | None = field(
        default=None, metadata={"flag": "--json-schema", "help": "File with a JSON schema: JSON that is valid by it."}
    )
    json_object: bool = field(default=False, metadata={"flag": "--json-object", "help": "Any JSON object."})
    regex: str | None = field(
        default=None, metadata={"flag": "--regex", "help": "Text that this regular expression matches as a whole."}
    )
    choice: list[str] | None = field(
        default=None, metadata={"flag": "--choice", "help": "One of these texts; given several times."}
    )
    grammar: Path | None = field(
        default=None,
        metadata={"flag": "--grammar", "help": "File with a grammar, in Lark's syntax or llama.cpp's (GBNF)."},
    )
    structural_tag: Path | None = field(
        default=None,
        metadata={
            "flag": "--structural-tag",
            "help": "File with structural tags, as JSON: free text with constrained parts.",
        },
    )

    def option(self) -> dict[str, Any] | None:
        """Returns the constraint as a client's option; None without one.

        Raises:
            ValueError: There are several.
            OSError: A file cannot be read.
        """
        texts = {"json_schema": self.json_schema, "grammar": self.grammar, "structural_tag": self.structural_tag}
        given: dict[str, Any] = {
            "json_object": self.json_object or None, "regex": self.regex, "choice": self.choice or None,
        }  # fmt: skip
        given |= {kind: None if file is None else file.read_text(encoding="utf-8") for kind, file in texts.items()}
        given = {kind: value for kind, value in given.items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"one constraint at most: {', '.join('--' + kind.replace('_', '-') for kind in given)}")
        return given or None
