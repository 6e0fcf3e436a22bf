"""Turns a `Spec` into a `Request`: renders, tokenizes and validates. It can take a second, so it runs in threads."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from model.config import read_config
from model.generation_config import read_defaults
from model.inputs.chat import find_chat_template
from model.inputs.chat_contents import Contents, contents_read, template_messages
from model.inputs.chat_output.chat_output import ChatOutput
from model.inputs.chat_output.families import AUTO
from model.inputs.chat_renderer import ChatFailed, ChatRenderer
from model.inputs.chat_tools import MAPPINGS, TurnForm, template_fields, template_tools, turn_form
from model.inputs.grammar_backends import LLGUIDANCE
from model.inputs.grammar_checker import GrammarChecker
from model.inputs.images import decode_images, image_digest
from model.inputs.tokenizer import Tokenizer, TokenizerFailed
from model.inputs.tokenizer_files import load_tokenizer
from model.inputs.trial import try_tokenizer
from model.inputs.vision.inputs import ImageInputs
from model.inputs.vision.processed import ProcessedImage
from model.inputs.vision.registry import read_image_inputs
from model.settings import ModelSettings
from model.simulated.config import simulated_config
from model.simulated.naming import is_simulated
from rpc.frontend.errors import RequestFailed, invalid
from rpc.frontend.outputs import Outputs
from rpc.paths import demo_directory, model_directory, model_name
from scheduler.bounds import check_bad_words, check_chat, check_text, check_token_ids, most_bytes
from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits, ModelDefaults
from scheduler.prompts import Chat, Truncation
from scheduler.request import PromptImage, Request
from scheduler.resolve import resolve
from scheduler.settings import ImageLimits
from scheduler.spec import Spec

LINE = "\n"  # begins a text whose tokens are to be those of one within another


@dataclass(frozen=True, slots=True)
class Preparer:
    """The frontend's share of a model: tokenizer, chat template and image inputs. Threads may share it.

    Attributes:
        name: Name of the served model.
        tokenizer: Tokenizer of the model.
        defaults: The model's own values for what a request leaves open.
        public: Token ids of the prefixes that the operator has declared public.
        chat: Renders conversations, and is ended by `close`; None where the model has no chat template.
        images: Turns images into the model's inputs; None for a text model.
        image_limits: Bounds of a request's images.
        prefix_lm: Prompts are bidirectional prefixes.
        outputs: Constraints on outputs, and their reading. Ended by `close`.
        contents: Form in which the chat template reads the content of a message.
        turns: Form in which it reads the turns of a conversation.
        architecture: Name of the architecture in config.json.
        context: Context length of the model, in tokens.
    """

    name: str
    tokenizer: Tokenizer
    defaults: ModelDefaults
    public: tuple[tuple[int, ...], ...] = ()
    chat: ChatRenderer | None = None
    images: ImageInputs | None = None
    image_limits: ImageLimits = field(default_factory=ImageLimits)
    prefix_lm: bool = False
    outputs: Outputs = field(default_factory=Outputs)
    contents: Contents = Contents.EITHER
    turns: TurnForm = MAPPINGS
    architecture: str = ""
    context: int = 0

    def prepare(self, spec: Spec, limits: Limits) -> Request:
        """Validates a request, and returns it as an engine gets it.

        Args:
            spec: The request as the client states it.
            limits: Limits of the engines.

        Raises:
            RequestFailed: NOT_FOUND for another model's name, INVALID_ARGUMENT for a value that cannot be served.
        """
        self.check_model(spec.model)
        try:
            self.outputs.check(spec, limits)
            images = self._images(spec, limits)
            ids = self._prompt_ids(spec, images, limits)
            end = self.outputs.prompt_end(spec, ids, self.tokenizer)
            public = max((_common(prefix, ids) for prefix in self.public), default=0)
            checked = self.outputs.grammar(spec, end)
            short, least = self.outputs.lengths(checked, self.tokenizer)
            return resolve(
                spec,
                ids,
                limits,
                self.defaults,
                secrets.randbits(64),
                public,
                self._bad_words(spec, limits),
                () if self.images is None else placed(ids, images, self.images.token_id, spec.sharing),
                self.prefix_lm,
                checked.grammar,
                short,
                least,
                self.outputs.reasoning(spec, end, self.tokenizer),
            )
        except InvalidRequest as error:
            raise invalid(error) from None

    def render(self, chat: Chat, limits: Limits) -> str:
        """Returns the conversation as the model's template writes it, special tokens included.

        Args:
            chat: The conversation.
            limits: Limits of the engines.

        Raises:
            InvalidRequest: A field has a value that cannot be served.
            RequestFailed: The model has no template, or its template fails.
        """
        arguments = check_chat(chat, limits)
        if self.chat is None:
            message = "the model has no chat template: send text or token_ids"
            raise RequestFailed("INVALID_ARGUMENT", "NO_CHAT_TEMPLATE", message, field="chat")
        marker = "" if self.images is None else self.images.marker
        messages = [
            written | template_fields(message, self.turns, f"chat.messages[{i}]")
            for i, (written, message) in enumerate(
                zip(template_messages(chat.messages, self.contents, marker), chat.messages, strict=True)
            )
        ]
        tools = template_tools(chat.tool_use.tools)
        try:
            text = self.chat.render(
                messages,
                arguments,
                most_bytes(limits.longest),
                tools=tools,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
            )
        except ChatFailed as failure:
            raise RequestFailed("INVALID_ARGUMENT", failure.reason, str(failure), field="chat") from None
        check_text(text, limits, "chat")
        return text

    def _images(self, spec: Spec, limits: Limits) -> list[ProcessedImage]:
        """Decodes the images, and processes them as the model takes them.

        Raises:
            InvalidRequest: An image cannot be read, or the images are too many or too large.
        """
        names, most = spec.image_fields, self.image_limits.images
        if not names:
            return []
        if self.images is None:
            raise InvalidRequest(names[0], "an image", f"{self.name!r} reads text alone")
        if len(names) > most:
            raise InvalidRequest(names[most], f"one of {len(names)} images", f"at most {most} in a request")
        made, tokens = list[ProcessedImage](), 0
        for name, pixels in zip(names, decode_images(spec.images, names, self.image_limits), strict=True):
            made.append(self.images.process(pixels))
            tokens += made[-1].tokens
            if tokens >= limits.longest:  # the rest need not be decoded
                reason = f"prompt and output must fit in {limits.longest} tokens"
                raise InvalidRequest(name, f"token {tokens} of the images", reason)
        return made

    def _prompt_ids(self, spec: Spec, images: list[ProcessedImage], limits: Limits) -> list[int]:
        """Returns the token ids of the prompt.

        Raises:
            InvalidRequest: A field has a value that cannot be served.
            RequestFailed: A conversation cannot be rendered.
        """
        match spec.prompt:
            case str(text):
                check_text(text, limits)
                ids = self._encoded("text", text, images, spec.add_special_tokens)
            case Chat() as chat:
                text = self.render(chat, limits)
                ids = self._encoded("chat", text, images, self._adds_special_tokens(text))
            case given:
                self._check_placeholders("token_ids", given, images)
                ids = list(given)
        return ids if spec.truncation is None else self._cut(spec, spec.truncation, ids, limits)

    def _cut(self, spec: Spec, truncation: Truncation, ids: list[int], limits: Limits) -> list[int]:
        adds = isinstance(spec.prompt, str) and spec.add_special_tokens
        beginning = _common(self.tokenizer.encode("", add_special_tokens=True), ids) if adds else 0
        return truncation.cut(ids, beginning, spec.stopping, limits)

    def _adds_special_tokens(self, text: str) -> bool:
        """Returns whether the tokenizer adds special tokens to the rendered text of a conversation.

        As in transformers: processors of vision-language models add them unless the template has begun with them, and
        tokenizers of text models add none.
        """
        beginning = None if self.chat is None else self.chat.beginning
        return self.images is not None and not (beginning and text.startswith(beginning))

    def _encoded(self, name: str, text: str, images: list[ProcessedImage], add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text with the placeholders of its images.

        Raises:
            InvalidRequest: The field `name`, which the text comes from, cannot be tokenized.
        """
        if self.images is not None and images:
            try:
                return self.images.encode(text, images, self.tokenizer, add_special_tokens)
            except InvalidRequest as error:
                raise (error.of(name) if error.field == "prompt" else error) from None
            except TokenizerFailed as failure:
                raise InvalidRequest(name, text, str(failure)) from None
        ids = self._ids(name, text, add_special_tokens)
        self._check_placeholders(name, ids, images)
        return ids

    def _ids(self, name: str, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text.

        Raises:
            InvalidRequest: The field `name`, which the text comes from, cannot be tokenized.
        """
        try:
            return self.tokenizer.encode(text, add_special_tokens)
        except TokenizerFailed as failure:
            raise InvalidRequest(name, text, str(failure)) from None

    def _ways(self, name: str, text: str) -> list[list[int]]:
        """Returns the token ids of a text that begins, and those behind a line if they differ. Raises as `_ids`."""
        ids = self._ids(name, text, False)
        try:
            line, behind = self.tokenizer.encode(LINE, False), self.tokenizer.encode(LINE + text, False)
        except TokenizerFailed:  # it has no token for a line's end
            return [ids]
        if behind[: len(line)] != line or behind[len(line) :] in ([], ids):
            return [ids]
        return [ids, behind[len(line) :]]

    def _check_placeholders(self, name: str, ids: Sequence[int], images: list[ProcessedImage]) -> None:
        """Raises InvalidRequest of the field `name` where the ids' image placeholders do not match the images."""
        if self.images is not None:
            try:
                self.images.check(ids, images)
            except InvalidRequest as error:
                raise error.of(name) from None

    def tokenize(self, text: str, add_special_tokens: bool, model: str, limits: Limits) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: The text.
            add_special_tokens: Adds the special tokens that the tokenizer puts around a text.
            model: Name of the model; "" for the only one.
            limits: Limits of the engines.

        Raises:
            RequestFailed: See `prepare`.
        """
        self.check_model(model)
        try:
            check_text(text, limits)
            return self._ids("text", text, add_special_tokens)
        except InvalidRequest as error:
            raise invalid(error) from None

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool, model: str, limits: Limits) -> str:
        """Returns the text of token ids.

        Args:
            ids: Token ids, at most as many as fit in the model's context.
            skip_special_tokens: Leaves special tokens out of the text.
            model: Name of the model; "" for the only one.
            limits: Limits of the engines.

        Raises:
            RequestFailed: See `prepare`.
        """
        self.check_model(model)
        try:
            check_token_ids(ids, limits)
            return self.tokenizer.decode_all(list(ids), skip_special_tokens)
        except InvalidRequest as error:
            raise invalid(error) from None
        except TokenizerFailed as failure:
            raise invalid(InvalidRequest("token_ids", list(ids[:20]), str(failure))) from None

    def check_model(self, name: str) -> None:
        """Raises RequestFailed NOT_FOUND unless the name is this model's, or empty."""
        if name not in ("", self.name):
            message = f"model {name[:100]!r} is not served here, {self.name!r} is"
            raise RequestFailed("NOT_FOUND", "MODEL_NOT_FOUND", message, field=name)

    def close(self) -> None:
        """Ends the renderer of conversations, and the checker of constraints."""
        self.outputs.close()
        if self.chat is not None:
            self.chat.close()

    def _bad_words(self, spec: Spec, limits: Limits) -> list[tuple[int, ...]]:
        """Returns the distinct token ids of each bad word: as it stands in the middle of a word, and after a space.

        Of tokenizers that put a space in front of a text also as it stands at the beginning of one. With `tool_choice`
        none tokens that begin calls are among them.
        """
        check_bad_words(spec, limits)
        words = [start + word.lstrip() for word in spec.sampling.bad_words for start in ("", " ")]
        found = [ids for word in words for ids in self._ways("sampling.bad_words", word)]
        return [*dict.fromkeys((*map(tuple, found), *((token,) for token in self.outputs.banned_calls(spec))))]


def placed(
    ids: Sequence[int], images: Sequence[ProcessedImage], placeholder: int, salt: str = ""
) -> tuple[PromptImage, ...]:
    """Returns the images of a prompt, each with the positions of its placeholders.

    Args:
        ids: Token ids of the prompt, one placeholder for each feature of each image.
        images: The images, in the order of their placeholders.
        placeholder: Token id of the placeholder.
        salt: Salt of the images' digests, as in `image_digest`.
    """
    places = np.flatnonzero(np.array(ids) == placeholder).astype(np.int32)
    ends = np.cumsum([image.tokens for image in images])
    made = []
    for image, end in zip(images, ends.tolist(), strict=True):
        digest = image_digest(image.pixels, image.grid, image.positions, salt)
        made.append(PromptImage(image.pixels, digest, places[end - image.tokens : end], image.grid, image.positions))
    return tuple(made)


def _common(prefix: Sequence[int], ids: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    pairs = enumerate(zip(prefix, ids, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(prefix), len(ids)))


def load_preparer(
    settings: ModelSettings,
    public_prefixes: str | None = None,
    image_limits: ImageLimits | None = None,
    tool_format: str = AUTO,
    reasoning_format: str = AUTO,
    structured_output_backend: str = LLGUIDANCE,
) -> Preparer:
    """Loads the frontend's share of a model. The caller closes it.

    Args:
        settings: Settings of the model.
        public_prefixes: Path of a file or directory, as in `FrontendSettings`.
        image_limits: Bounds of a request's images; None: the defaults.
        tool_format: Form of tool calls, as in `FrontendSettings`.
        reasoning_format: Form of reasoning, likewise.
        structured_output_backend: Library that keeps constraints, likewise.

    Raises:
        CheckpointError: The model's files cannot be used, or there is no format of this name.
        OSError: A file cannot be read.
        ValueError: A public prefix is no text, or cannot be tokenized.
    """
    directory = model_directory(settings.model)
    simulated = is_simulated(settings.model)
    config = simulated_config(settings.model) if simulated else read_config(directory)
    defaults = read_defaults(directory, config)
    name = settings.served_model_name or model_name(settings.model, directory)
    if not simulated and directory != demo_directory():  # these tokenizers are Quire's own, and need no trial
        try_tokenizer(directory)
    tokenizer = load_tokenizer(directory)
    try:
        public = tuple(tuple(tokenizer.encode(text, True)) for text in _texts(public_prefixes))
    except TokenizerFailed as failure:
        raise ValueError(f"--public-prefixes {public_prefixes}: {failure}") from None
    images, sees = read_image_inputs(directory, config, tokenizer), config.vision is not None
    template = find_chat_template(directory, sees)
    source = template.source if template is not None else ""
    markers = tokenizer.marker_texts
    form = ChatOutput.of(source, markers, tool_format, reasoning_format)
    chat = ChatRenderer(template) if template is not None else None
    contents = contents_read(chat) if sees and chat is not None else Contents.EITHER
    return Preparer(
        name,
        tokenizer,
        defaults,
        public,
        chat,
        images,
        image_limits or ImageLimits(),
        config.vision is not None and config.vision.prefix_lm,
        outputs=Outputs(form, GrammarChecker(structured_output_backend), markers, ends=defaults.eos_token_ids),
        contents=contents,
        turns=MAPPINGS if chat is None else turn_form(chat, contents, form.tools is not None),
        architecture=config.architecture,
        context=config.context,
    )


def _texts(place: str | None) -> list[str]:
    """Returns the texts of a file, or of the files of a directory; none for None.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is no UTF-8 text.
    """
    if place is None:
        return []
    path = Path(place)
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    try:
        return [file.read_text(encoding="utf-8").removesuffix("\n") for file in files]
    except UnicodeDecodeError as error:
        raise ValueError(f"--public-prefixes {place} holds a file that is no UTF-8 text: {error}") from None
