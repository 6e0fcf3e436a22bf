"""What the output of a request must be, and how it is read: constraints, tool calls, reasoning."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from model.inputs.chat_output.chat_output import NO_CHAT_OUTPUT, ChatOutput, call_ids
from model.inputs.chat_output.grammar_form import OutputConstraint, OutputForm
from model.inputs.chat_output.marks import MARKS
from model.inputs.chat_output.parser import Parsing
from model.inputs.grammar_checker import Checked, Constraint, GrammarChecker, GrammarUnchecked
from model.inputs.grammars import GrammarRefused
from model.inputs.tokenizer import Tokenizer
from rpc.frontend.completeness import Completeness, Question
from rpc.frontend.errors import RequestFailed
from scheduler.invalid import InvalidRequest, require
from scheduler.limits import Limits
from scheduler.prompts import Chat
from scheduler.request import Request
from scheduler.resolve import check_structured, check_tool_use
from scheduler.spec import Spec
from scheduler.step import Ints
from scheduler.structured import STRUCTURAL_TAG, Structured
from scheduler.tools import NO_TOOLS, ToolChoice, ToolUse, object_of

MOST_KNOWN, MOST_TAGGED = 2**18, 2**14  # characters of parameters, and of structural tags
UNCONSTRAINED = Checked("")
LAST = 64  # tokens at the end of a prompt, in which a template may begin the reasoning or end it


@dataclass(frozen=True, slots=True)
class Outputs:
    """Constraints on the outputs of a model, and their reading. Threads may share it.

    Attributes:
        form: Form of tool calls and of reasoning.
        grammars: Checks constraints, and is ended by `close`.
        special: Texts of the model's special tokens by id, as in `Tokenizer.marker_texts`.
        ends: Ids of its end tokens.
    """

    form: ChatOutput = NO_CHAT_OUTPUT
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    special: Mapping[int, str] = field(default_factory=dict)
    ends: tuple[int, ...] = ()

    def check(self, spec: Spec, limits: Limits) -> None:
        """Checks what the output must be, before the work on the prompt.

        Raises:
            InvalidRequest: A field has a value that cannot be served.
            RequestFailed: The model calls no tools.
        """
        tool_use = tool_use_of(spec)
        if spec.structured is not None:
            check_structured(spec, spec.structured, limits)
            self._check_tags(spec, spec.structured)
            reasons = isinstance(spec.prompt, Chat) and self.form.reasoning is not None and spec.output.raw_text
            says = "beside a constraint does not go with output.raw_text, which has the reasoning too"
            require(not (reasons and spec.stopping.stop), "stopping.stop", spec.stopping.stop, says)
        if tool_use.offered:
            if self.form.tools is None:
                message = "the form of this model's tool calls is not known: see --tool-format of `quire serve`"
                raise RequestFailed("INVALID_ARGUMENT", "NO_TOOL_FORMAT", message, field="chat.tools")
            if tool_use.constrains or spec.structured is not None:
                check_tool_use(spec, tool_use, limits)
            if spec.structured is not None and spec.structured.kind == STRUCTURAL_TAG:
                says = "does not go with tools that may be called: give them as tags, or set tool_choice to none"
                raise InvalidRequest(spec.structured.path, spec.structured.text, says)
        if spec.reasoning_tokens is not None:
            name, most = "reasoning.max_tokens", spec.reasoning_tokens
            known = isinstance(spec.prompt, Chat) and self.form.reasoning is not None
            require(known, name, most, "is for conversations with models that reason, see --reasoning-format")
            require(spec.sampling.beam is None, name, most, "does not go with sampling.beam_search")

    def _check_tags(self, spec: Spec, structured: Structured) -> None:
        """Checks special tokens of structural tags: none ends the output, or is left out where its text is searched.

        Raises:
            InvalidRequest: One does.
        """
        if structured.kind != STRUCTURAL_TAG:
            return
        ends = [self.special[i] for i in self.ends if self.special.get(i)]
        hides = bool(spec.stopping.stop) and spec.output.skip_special_tokens
        for tag in structured.tags.tags:
            for name, text in (("begin", tag.begin), ("end", tag.end)):
                if hides and any(special and special in text for special in self.special.values()):
                    says = f"needs output.skip_special_tokens false beside the special tokens of {tag.place}.{name}"
                    raise InvalidRequest("stopping.stop", spec.stopping.stop, says)
                found = next((end for end in ends if end in text), None)
                says = f"has the model's end token {found!r:.60}, behind which no output goes on"
                require(found is None, f"{tag.place}.{name}", text, says)

    def _check_stops(self, spec: Spec, constraint: Constraint) -> None:
        """Checks that stop tokens beside a constraint can be taken as end tokens: no output has them in it.

        Raises:
            InvalidRequest: An output might have one.
        """
        if not spec.stopping.stop_token_ids:
            return
        named = OutputForm.of_text(constraint.text).ids if isinstance(constraint, OutputConstraint) else {}
        for i, token in enumerate(spec.stopping.stop_token_ids):
            name = f"stopping.stop_token_ids[{i}]"
            if token not in self.ends and token in named.values():
                says = f"is {self.special.get(token, '')!r:.60}, which an output with this constraint may have in it"
                raise InvalidRequest(name, token, says)
            says = "is a token of text, in which a constrained output may need it: give its text as stopping.stop"
            require(token in self.ends or token in self.special, name, token, says)

    def prompt_end(self, spec: Spec, ids: Sequence[int] | Ints, tokenizer: Tokenizer) -> str:
        """Returns the text at a conversation's end that says whether the output begins with reasoning.

        Where the last message is continued it is that message's text alone, or the mark with which the template has
        begun the reasoning before it: what others have written of such marks says nothing.
        """
        chat, form = spec.prompt, self.form.reasoning
        if (form is None and self.form.tools is None) or not isinstance(chat, Chat):
            return ""
        own = _last_text(chat).strip() if chat.continue_final_message else ""
        last = ids[-LAST - len(own.encode()) :]  # a token has a byte at least
        text = tokenizer.decode([int(token) for token in last], skip_special_tokens=False)
        if form is None or not chat.continue_final_message:
            return text
        if own not in text:  # the tokenizer normalizes it
            own = tokenizer.decode(tokenizer.encode(own, add_special_tokens=False), skip_special_tokens=False).strip()
        before, found, behind = text.rpartition(own) if own in text and own else (text, "", "")
        begin, end = self.form.literal(form.begin).strip(), self.form.literal(form.end).strip()
        said = found + behind
        return begin if before.rstrip().endswith(begin) and begin not in said and end not in said else said

    def banned_calls(self, spec: Spec) -> tuple[int, ...]:
        """Returns the special tokens that begin calls, where none may be, without those of structural tags."""
        use, structured = tool_use_of(spec), spec.structured
        if not use.tools or use.choice is not ToolChoice.NONE:
            return ()
        tags = structured.tags.tags if structured is not None and structured.kind == STRUCTURAL_TAG else ()
        written = [text for tag in tags for text in (tag.begin, tag.end)]
        return tuple(
            token for token in self.form.call_tokens if not any(self.special[token] in text for text in written)
        )

    def knows_grammar(self, spec: Spec) -> bool:
        """Returns whether the constraint on the output, if there is one, was checked before."""
        size, structured = sum(len(tool.parameters) for tool in tool_use_of(spec).tools), spec.structured
        tagged = len(structured.text) if structured is not None and structured.kind == STRUCTURAL_TAG else 0
        if size > MOST_KNOWN or tagged > MOST_TAGGED:
            return False  # to ask would take the event loop too long
        if structured is not None and spec.output_prefix and spec.stopping.stop:
            return False  # stop strings in the prefix are asked about
        return all(
            constraint is None or self.grammars.knows(constraint, spec.sharing)
            for constraint in {self._constraint(spec, end) for end in self._possible_ends(spec)}
        )

    def _possible_ends(self, spec: Spec) -> tuple[str, ...]:
        """Returns prompts' ends that stand for all that make different constraints of one request."""
        form = self.form.reasoning
        if form is None or not isinstance(spec.prompt, Chat):
            return ("",)
        return ("", self.form.literal(form.begin), self.form.literal(form.end))

    def _constraint(self, spec: Spec, end: str) -> Constraint | None:
        """Returns the constraint on the output; None for none. end: of the prompt."""
        if isinstance(spec.prompt, Chat):
            form = self.form.form(spec.prompt.tool_use, spec.structured, end, spec.prompt.continue_final_message)
            if form is not None:
                return self._with_marks(form, spec.structured).constraint()
        if spec.structured is None or spec.structured.kind != STRUCTURAL_TAG:
            return spec.structured
        form = OutputForm(None, None, answer=(spec.structured.kind, spec.structured.text))
        marked = self._with_marks(form, spec.structured)
        return marked.constraint() if marked.special else spec.structured

    def _with_marks(self, form: OutputForm, structured: Structured | None) -> OutputForm:
        """Returns what an output must be with marks of the special tokens that structural tags have."""
        if structured is None or structured.kind != STRUCTURAL_TAG:
            return form
        tags = structured.tags.tags
        marks = self.form.marks.more(self.special, [text for tag in tags for text in (tag.begin, tag.end)])
        special = {char: self.special[i] for char, i in marks.items()}
        return replace(form, ids={**form.ids, **marks}, special=special)

    def grammar(self, spec: Spec, end: str) -> Checked:
        """Returns the grammar of the constraint on the output, "" without one, and a short output of it.

        Args:
            spec: The request.
            end: End of its prompt.

        Raises:
            InvalidRequest: The constraint cannot be enforced.
            RequestFailed: The process that checks constraints cannot be started, or dies.
        """
        constraint = self._constraint(spec, end)
        if constraint is None:
            return UNCONSTRAINED
        self._check_stops(spec, constraint)
        try:
            return self.grammars.grammar(constraint, spec.sharing)
        except GrammarRefused as refused:
            name, value = "chat.tools", f"{len(tool_use_of(spec).offered)} tools"
            if refused.field:
                name, value = refused.field, "a schema" if refused.field.startswith("chat.") else "its content"
            elif spec.structured is not None:
                name, value = spec.structured.path, spec.structured.text
            raise InvalidRequest(name, value, str(refused)) from None
        except GrammarUnchecked as lost:
            raise _unchecked(lost) from None

    def completeness(self, spec: Spec, request: Request, tokenizer: Tokenizer) -> Completeness | None:
        """Returns what is asked about the outputs of a request; None for one without a constraint.

        Args:
            spec: A request that was accepted.
            request: The request as the engine gets it.
            tokenizer: Tokenizer of the model.
        """
        if not request.controls.logits_params.grammar:
            return None
        end = self.prompt_end(spec, request.prompt, tokenizer)
        constraint = self._constraint(spec, end)
        if constraint is None:
            return None
        structured, form, ends = spec.structured, OutputForm(None, None), tuple[str, ...]()
        if isinstance(constraint, OutputConstraint):
            form = OutputForm.of_text(constraint.text)
        if structured is not None and structured.kind == STRUCTURAL_TAG:
            ends = tuple(form.marked(tag.end) for tag in structured.tags.tags)
        marks = {token: mark for mark, token in form.ids.items()}
        content: Constraint | None = structured
        if isinstance(constraint, OutputConstraint) and structured is not None and structured.kind != STRUCTURAL_TAG:
            # As a part of such a constraint llguidance keeps it, whatever library keeps it alone.
            content = OutputForm(None, None, answer=(structured.kind, structured.text)).constraint()
        unread = content is None and not _reads(spec)
        parsing = next(self._parsings(spec, request, tokenizer)) if unread else None
        return Completeness(
            constraint, content, marks, ends, parsing, tokenizer, self._is_complete, self._complete_ends
        )

    def _is_complete(self, question: Question) -> bool:
        try:
            return self.grammars.is_complete(question.constraint, question.text)
        except GrammarUnchecked as lost:
            raise _unchecked(lost) from None

    def _complete_ends(self, constraint: Constraint, text: str, ends: Sequence[int]) -> list[int]:
        try:
            return self.grammars.complete_ends(constraint, text, ends)
        except GrammarUnchecked as lost:
            raise _unchecked(lost) from None

    def lengths(self, checked: Checked, tokenizer: Tokenizer) -> tuple[int | None, int]:
        """Returns tokens of a short output with a constraint, and the fewest that any has.

        Args:
            checked: The constraint.
            tokenizer: Tokenizer of the model.

        Returns:
            Tokens of a short output, or of a structural tag where one has more, None where none is known; and the
            fewest, 0 where that is not known.
        """
        if checked.short is None:
            return None, 0
        short, closing = (self._length(text, tokenizer) for text in (checked.short, checked.closing))
        return max(short, closing), short if checked.sure else 0

    def _length(self, text: str, tokenizer: Tokenizer) -> int:
        """Returns the tokens of a marked text."""
        parts = [part for part in re.split(f"([{MARKS}])", text) if part]
        return sum(1 if re.match(f"[{MARKS}]", part) else len(tokenizer.encode(part, False)) for part in parts)

    def reasoning(self, spec: Spec, end: str, tokenizer: Tokenizer) -> dict[str, object]:
        """Returns the fields of `LogitsParams` that bound the reasoning, or that only say how it ends.

        Args:
            spec: The request.
            end: End of its prompt.
            tokenizer: Tokenizer of the model.

        Raises:
            InvalidRequest: The tokenizer cannot write the markers.
        """
        form = self.form.reasoning
        if form is None or not isinstance(spec.prompt, Chat):
            return {}
        begin, stop = (tokenizer.encode(self.form.literal(text).strip(), False) for text in (form.begin, form.end))
        if spec.reasoning_tokens is None:
            # A constrained answer behind it has to be closed in time all the same. Letters of an end that is no special
            # token may stand in any answer, so they are an end only where the output surely begins with reasoning.
            known = self._thinks(spec, end) or (len(stop) == 1 and self.form.may_reason(end))
            return {"reasoning_end": tuple(stop)} if known and self._constraint(spec, end) is not None else {}
        name, most = "reasoning.max_tokens", spec.reasoning_tokens
        require(begin and stop, name, most, "the model's tokenizer has no tokens for the markers of reasoning")
        return {
            "reasoning_tokens": most,
            "reasoning_begin": tuple(begin),
            "reasoning_end": tuple(stop),
            "reasons": self._thinks(spec, end),
            "reasons_again": form.anywhere,
        }

    def _thinks(self, spec: Spec, end: str) -> bool:
        return isinstance(spec.prompt, Chat) and self.form.thinks(end, spec.prompt.continue_final_message)

    def parsings(self, spec: Spec, request: Request, tokenizer: Tokenizer) -> tuple[Parsing | None, ...]:
        """Returns how the output of each sequence is read; None for one that is text alone.

        Args:
            spec: A request that was accepted.
            request: The request as the engine gets it.
            tokenizer: Tokenizer of the model.
        """
        if not isinstance(spec.prompt, Chat) or not _reads(spec):
            return (None,) * request.count
        return tuple(self._parsings(spec, request, tokenizer))

    def _parsings(self, spec: Spec, request: Request, tokenizer: Tokenizer) -> Iterator[Parsing | None]:
        """Returns how the output of each sequence of a conversation is read."""
        tool_use = tool_use_of(spec)
        schemas = {tool.name: object_of(tool.parameters, "chat.tools") for tool in tool_use.offered}
        key = hashlib.blake2b(request.prompt.tobytes() + b"%d" % request.controls.seed).digest()
        end = self.prompt_end(spec, request.prompt, tokenizer)
        thinks = self._thinks(spec, end)
        for index in range(request.count):
            call_id = call_ids(self.form.tools, key, index)
            yield self.form.parsing(tool_use, schemas, thinks, call_id, spec.structured)

    def close(self) -> None:
        """Ends the checker of constraints."""
        self.grammars.close()


def _reads(spec: Spec) -> bool:
    """Returns whether the parts of a conversation's output are told apart. Stop strings are of the answer."""
    return bool(spec.output.text or spec.stopping.stop) and not spec.output.raw_text


def _unchecked(lost: GrammarUnchecked) -> RequestFailed:
    return RequestFailed("UNAVAILABLE", "GRAMMAR_UNCHECKED", str(lost), retry_after=1.0)


def tool_use_of(spec: Spec) -> ToolUse:
    """Returns the tools of a request's conversation."""
    return spec.prompt.tool_use if isinstance(spec.prompt, Chat) else NO_TOOLS


def _last_text(chat: Chat) -> str:
    """Returns the text of the last message, behind its last image."""
    texts = list[str]()
    for part in chat.messages[-1].parts:
        texts = [*texts, part] if isinstance(part, str) else []
    return "".join(texts)
