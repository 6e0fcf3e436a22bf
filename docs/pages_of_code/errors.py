"""docs/reference/errors.md: the reasons that the code gives, each with its meaning and its remedy.

A reason that the code gives and this table lacks, or the other way round, ends the program.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from docs.pages_of_code.tables import table, text

ROOT = Path(__file__).parents[2]
API = ("rpc/access", "rpc/engines", "rpc/frontend", "rpc/services", "model/inputs")
FAILURES = {"RequestFailed", "ChatFailed", "__init__"}
HEAD = """\
# Errors

Written by `make reference`: codes and reasons come from the code.

A call that fails ends with a gRPC status whose details have a `google.rpc.ErrorInfo` with domain `quire` and a stable
reason. INVALID_ARGUMENT also has a `BadRequest` with the field, a refusal that may pass has a `RetryInfo`, and
MODEL_NOT_FOUND a `ResourceInfo`. The message names the field, the value, the limit and the remedy. The Python client
raises a class for each code ([clients](../guides/clients.md)); the gateway answers with OpenAI's `error`
([statuses](../guides/openai.md)).
"""
REASONS = {
    "CHAT_ERROR": ("The model's chat template fails on the conversation.", "Correct the conversation or the template."),
    "CHAT_LIMIT": ("The template exceeds its time, memory or length.", "Send a shorter conversation."),
    "CHAT_REFUSED": ("The template refuses the conversation, in its own words.", "Follow the words of the message."),
    "DRAINING": ("The server is about to end.", "Ask another server, or come again."),
    "ENGINE_FAILED": ("No engine was there, or became available in time.", "Come again after `RetryInfo`."),
    "GRAMMAR_UNCHECKED": (
        "The process that checks constraints was lost, or too slow.",
        "Come again after `RetryInfo`.",
    ),
    "INTERNAL": ("An unforeseen error; the server's log has it.", "Report it."),
    "INVALID_FIELD": ("A value is out of its range, or does not fit.", "Correct the field that the error names."),
    "MODEL_NOT_FOUND": ("The server serves another model.", "`quire models` names it."),
    "NOT_ENDED": ("The server read a result before its request ended.", "Report it."),
    "NOT_ITS_REPLICA": ("The replica belongs to another server.", "Ask that server's admin port."),
    "NOT_RESTARTED": ("A replica could not be replaced in time.", "The message and the log say why."),
    "NOT_SUPPORTED": ("A field, tensor or rpc does not exist in Quire.", "Leave it out."),
    "NO_ANSWER": ("The engine did not answer an operator's question.", "Look at its health; ask again."),
    "NO_CHAT_TEMPLATE": ("The model has no chat template.", "Send text or token ids."),
    "NO_OPERATOR": ("The token is not an operator's.", "Use a token with `operator` in the token file."),
    "NO_OTHER_REPLICA": ("A drain needs another engine.", "Run `--replicas 2` or more."),
    "NO_OUTPUT": ("The server has no such output tensor.", "Report it."),
    "NO_POLICY": ("The rpc is open to no caller.", "Call another rpc."),
    "NO_SUCH_REPLICA": ("No replica has this number.", "`quire cluster status` lists them."),
    "NO_SUCH_REQUEST": ("No live request has this id.", "`quire admin requests` lists them."),
    "NO_TOOL_FORMAT": (
        "The form in which the model calls tools is not known.",
        "Say it with `quire serve --tool-format`, or use a model whose chat template has tools.",
    ),
    "NO_TOKEN": ("The call has none of the server's tokens.", "Send `authorization: Bearer TOKEN`."),
    "NO_TOKEN_LEFT": ("The controls of the request leave no token to draw.", "Loosen allowed tokens or bad words."),
    "QUARANTINED": ("Engines died of this request.", "Report it with the server's log; do not send it again."),
    "QUEUE_FULL": ("The queue, or a tenant's part of it, is full.", "Come again after `RetryInfo`."),
    "QUEUE_TIMEOUT": ("The wait is, or would be, too long.", "Come again after `RetryInfo`."),
    "REQUEST_FAULT": ("This request could not be computed, even isolated.", "The message says why; report it."),
    "REQUEST_ID_LIVE": ("A live request has this id.", "Use another id."),
    "SLOW_READER": ("The client did not read its stream.", "Read faster, or ask for larger messages."),
    "STARTING": ("The model is being loaded, or no engine is ready.", "Come again after `RetryInfo`."),
}


def page() -> str:
    """Returns the text of the page.

    Raises:
        ValueError: The code and REASONS differ.
    """
    found = reasons()
    if differing := found.keys() ^ REASONS.keys():
        raise ValueError(f"reasons of the code and of {__file__} differ: {', '.join(sorted(differing))}")
    rows = [(f"`{reason}`", ", ".join(sorted(found[reason])), *REASONS[reason]) for reason in sorted(found)]
    return text([HEAD, *table(("reason", "code", "meaning", "remedy"), rows)])


def reasons() -> dict[str, set[str]]:
    """Reads each reason that the API's code gives, with its gRPC codes."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder in API:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for code, reason in _given(ast.parse(path.read_text(encoding="utf-8"))):
                found[reason].add(code)
    return found


def _given(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        texts = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if name in ("ChatFailed", "_failure") and texts and texts[0].startswith("CHAT_"):
            yield "INVALID_ARGUMENT", texts[0]
        elif name in FAILURES and len(texts) >= 2 and texts[0].isupper() and texts[1].isupper():
            yield texts[0], texts[1]
