"""Bounds of what a request makes a frontend's workers do, checked before they do it."""

from collections.abc import Sequence

from scheduler.request import InvalidRequest, Limits, Spec, check_ids

BYTES_A_TOKEN = 16  # more than text in any language takes on average; bounds what is worth tokenizing


def check_bad_words(spec: Spec, limits: Limits) -> None:
    """Raises InvalidRequest."""
    words, most = spec.sampling.bad_words, limits.request
    if len(words) > most.bad_words:
        raise InvalidRequest("sampling.bad_words", f"{len(words)} words", f"at most {most.bad_words}")
    longest = BYTES_A_TOKEN * most.bad_word_tokens
    for i, word in enumerate(words):
        size = _size(word, f"sampling.bad_words[{i}]")
        if size > longest:
            raise InvalidRequest(f"sampling.bad_words[{i}]", f"{size} bytes", f"at most {longest} bytes")


def check_text(text: str, limits: Limits) -> None:
    """Raises InvalidRequest."""
    size, most = _size(text, "text"), most_bytes(limits)
    if size > most:
        raise InvalidRequest("text", f"{size} bytes", f"at most {most} bytes for {limits.longest} tokens")


def check_token_ids(ids: Sequence[int], limits: Limits) -> None:
    """Of what is to become text. Raises InvalidRequest."""
    check_ids("token_ids", ids, limits.context, limits)


def most_bytes(limits: Limits) -> int:
    """Of text that is worth tokenizing."""
    return max(2**16, BYTES_A_TOKEN * limits.longest)


def _size(text: str, name: str) -> int:
    """In bytes. Raises InvalidRequest."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(name, text, "is no Unicode text") from None
