"""From a `Spec` to a `Request`: renders, tokenizes and validates, in worker threads, since it can take a while."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from model.config import read_config, read_defaults
from model.inputs.chat import find_chat_template
from model.inputs.chat_contents import Contents, contents_read, template_messages
from model.inputs.chat_renderer import ChatFailed, ChatRenderer
from model.inputs.images import decode_images, image_digest
from model.inputs.tokenizer import Tokenizer, TokenizerFailed
from model.inputs.tokenizer_files import load_tokenizer
from model.inputs.trial import try_tokenizer
from model.inputs.vision.inputs import ImageInputs
from model.inputs.vision.registry import read_image_inputs
from model.inputs.vision.tiles import Tiles
from model.settings import ModelSettings
from rpc.frontend.errors import RequestFailed, invalid
from rpc.paths import demo_directory, model_directory, model_name
from scheduler.bounds import check_bad_words, check_chat, check_text, check_token_ids, most_bytes
from scheduler.limits import Limits, ModelDefaults
from scheduler.request import Chat, InvalidRequest, PromptImage, Request, Spec, Truncation, resolve
from scheduler.settings import ImageLimits


@dataclass(frozen=True, slots=True)
class Preparer:
    """name: of the served model. public: token ids of the prefixes that the operator has declared public. chat: None
    where the model has no chat template; `close` ends it. contents: what that template reads of a message. images: None
    for a model of text alone. prefix_lm: tokens of its prompts see each other in both directions. architecture: as
    config.json names it. context: the model's, in tokens.
    """

    name: str
    tokenizer: Tokenizer
    defaults: ModelDefaults
    public: tuple[tuple[int, ...], ...] = ()
    chat: ChatRenderer | None = None
    images: ImageInputs | None = None
    image_limits: ImageLimits = field(default_factory=ImageLimits)
    prefix_lm: bool = False
    contents: Contents = Contents.EITHER
    architecture: str = ""
    context: int = 0

    def prepare(self, spec: Spec, limits: Limits) -> Request:
        """limits: of the engine that will get it. Raises RequestFailed: NOT_FOUND for another model's name,
        INVALID_ARGUMENT for a value that cannot be served.
        """
        self.check_model(spec.model)
        try:
            tiles = self._tiles(spec, limits)
            ids = self._prompt_ids(spec, tiles, limits)
            public = max((_common(prefix, ids) for prefix in self.public), default=0)
            return resolve(
                spec,
                ids,
                limits,
                self.defaults,
                secrets.randbits(64),
                public,
                self._bad_words(spec, limits),
                ()
                if self.images is None
                else placed(ids, tiles, self.images.token_id, f"{spec.tenant}/{spec.cache_salt}"),
                self.prefix_lm,
            )
        except InvalidRequest as error:
            raise invalid(error) from None

    def _tiles(self, spec: Spec, limits: Limits) -> list[Tiles]:
        """The images as the model takes them. Raises InvalidRequest."""
        names, most = spec.image_fields, self.image_limits.images
        if not names:
            return []
        if self.images is None:
            raise InvalidRequest(names[0], "an image", f"{self.name!r} reads text alone")
        if len(names) > most:
            raise InvalidRequest(names[most], f"one of {len(names)} images", f"at most {most} in a request")
        cut, tokens = list[Tiles](), 0
        for name, pixels in zip(names, decode_images(spec.images, names, self.image_limits), strict=True):
            cut.append(self.images.cut(pixels))
            tokens += cut[-1].tokens
            if tokens >= limits.longest:  # the rest need not be decoded
                reason = f"prompt and output must fit in {limits.longest} tokens"
                raise InvalidRequest(name, f"token {tokens} of the images", reason)
        return cut

    def _prompt_ids(self, spec: Spec, images: list[Tiles], limits: Limits) -> list[int]:
        """Raises InvalidRequest, RequestFailed."""
        match spec.prompt:
            case str(text):
                check_text(text, limits)
                ids = self._encoded("text", text, images, spec.add_special_tokens)
            case Chat() as chat:
                text = self._rendered(chat, limits)
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
        """To the text of a conversation. As in transformers, whose processors of models that see add those that the
        template has not begun with, and whose tokenizers of others add none.
        """
        beginning = None if self.chat is None else self.chat.beginning
        return self.images is not None and not (beginning and text.startswith(beginning))

    def _encoded(self, name: str, text: str, images: list[Tiles], add_special_tokens: bool) -> list[int]:
        """name: of the field that the text comes from. Raises InvalidRequest."""
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
        """name: of the field that the text comes from. Raises InvalidRequest."""
        try:
            return self.tokenizer.encode(text, add_special_tokens)
        except TokenizerFailed as failure:
            raise InvalidRequest(name, text, str(failure)) from None

    def _check_placeholders(self, name: str, ids: Sequence[int], images: list[Tiles]) -> None:
        """name: of the field that the ids come from. Raises InvalidRequest."""
        if self.images is not None:
            try:
                self.images.check(ids, images)
            except InvalidRequest as error:
                raise error.of(name) from None

    def _rendered(self, chat: Chat, limits: Limits) -> str:
        """The conversation as the model's template writes it, special tokens too. Raises as `_prompt_ids`."""
        arguments = check_chat(chat, limits)
        if self.chat is None:
            message = "the model has no chat template: send text or token_ids"
            raise RequestFailed("INVALID_ARGUMENT", "NO_CHAT_TEMPLATE", message, field="chat")
        marker = "" if self.images is None else self.images.marker
        messages = template_messages(chat.messages, self.contents, marker)
        try:
            text = self.chat.render(
                messages,
                arguments,
                most_bytes(limits.longest),
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
            )
        except ChatFailed as failure:
            raise RequestFailed("INVALID_ARGUMENT", failure.reason, str(failure), field="chat") from None
        check_text(text, limits, "chat")
        return text

    def tokenize(self, text: str, add_special_tokens: bool, model: str, limits: Limits) -> list[int]:
        """model: its name, "" for the only one. Raises RequestFailed as `prepare` does."""
        self.check_model(model)
        try:
            check_text(text, limits)
            return self._ids("text", text, add_special_tokens)
        except InvalidRequest as error:
            raise invalid(error) from None

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool, model: str, limits: Limits) -> str:
        """At most as many ids as the model's context has. Raises RequestFailed as `prepare` does."""
        self.check_model(model)
        try:
            check_token_ids(ids, limits)
            return self.tokenizer.decode_all(list(ids), skip_special_tokens)
        except InvalidRequest as error:
            raise invalid(error) from None
        except TokenizerFailed as failure:
            raise invalid(InvalidRequest("token_ids", list(ids[:20]), str(failure))) from None

    def check_model(self, name: str) -> None:
        """Raises RequestFailed NOT_FOUND unless it is the name of this model, or none."""
        if name not in ("", self.name):
            message = f"model {name[:100]!r} is not served here, {self.name!r} is"
            raise RequestFailed("NOT_FOUND", "MODEL_NOT_FOUND", message, field=name)

    def close(self) -> None:
        """No conversation is rendered any more."""
        if self.chat is not None:
            self.chat.close()

    def _bad_words(self, spec: Spec, limits: Limits) -> list[list[int]]:
        """Token ids of each, as it is written in the middle of a word and after a space."""
        check_bad_words(spec, limits)
        words = [word.lstrip() for word in spec.sampling.bad_words]
        return [self._ids("sampling.bad_words", start + word, False) for word in words for start in ("", " ")]


def placed(ids: Sequence[int], images: Sequence[Tiles], placeholder: int, salt: str = "") -> tuple[PromptImage, ...]:
    """The images of a prompt, each with the places of its features, of which there are as many as placeholders.

    salt: as in `image_digest`.
    """
    places = np.flatnonzero(np.array(ids) == placeholder).astype(np.int32)
    ends = np.cumsum([image.tokens for image in images])
    return tuple(
        PromptImage(image.pixels, image_digest(image.pixels, salt), places[end - image.tokens : end])
        for image, end in zip(images, ends.tolist(), strict=True)
    )


def _common(prefix: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens the two start with alike."""
    pairs = enumerate(zip(prefix, ids, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(prefix), len(ids)))


def load_preparer(
    settings: ModelSettings, public_prefixes: str | None = None, image_limits: ImageLimits | None = None
) -> Preparer:
    """The frontend's share of a model, to be closed. public_prefixes: as in `FrontendSettings`. Raises CheckpointError,
    OSError.
    """
    directory = model_directory(settings.model)
    config = read_config(directory)
    defaults = read_defaults(directory, config)
    name = settings.served_model_name or model_name(settings.model, directory)
    if directory != demo_directory():  # which is ours
        try_tokenizer(directory)
    tokenizer = load_tokenizer(directory)
    try:
        public = tuple(tuple(tokenizer.encode(text, True)) for text in _texts(public_prefixes))
    except TokenizerFailed as failure:
        raise ValueError(f"--public-prefixes {public_prefixes}: {failure}") from None
    images, sees = read_image_inputs(directory, config, tokenizer), config.vision is not None
    template = find_chat_template(directory, sees)
    chat = ChatRenderer(template) if template is not None else None
    return Preparer(
        name,
        tokenizer,
        defaults,
        public,
        chat,
        images,
        image_limits or ImageLimits(),
        config.vision is not None and config.vision.prefix_lm,
        contents=contents_read(chat) if sees and chat is not None else Contents.EITHER,
        architecture=config.architecture,
        context=config.context,
    )


def _texts(place: str | None) -> list[str]:
    """The texts of a file, or of the files of a directory. Raises OSError, ValueError for what is no text."""
    if place is None:
        return []
    path = Path(place)
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    try:
        return [file.read_text(encoding="utf-8").removesuffix("\n") for file in files]
    except UnicodeDecodeError as error:
        raise ValueError(f"--public-prefixes {place} holds a file that is no UTF-8 text: {error}") from None
