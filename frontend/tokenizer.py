"""A model's tokenizer: text to ids, conversations to ids, and what its files say about the ends of texts.

Loaded without torch: importing transformers' AutoTokenizer would pull it in and take seconds.
"""

import json
import logging
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from tokenizers import Tokenizer

from frontend.chat_template import ChatTemplate
from frontend.detokenizer import Detokenizer
from frontend.gguf_tokenizer import GgufVocabulary, TokenId, build_tokenizer
from frontend.token_bytes import TokenBytes
from protocol.config import EngineConfig
from protocol.gguf_header import read_header

log = logging.getLogger(__name__)

Settings = TypeVar("Settings")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class ModelTokenizer:
    """What the doors need of a tokenizer. Methods that take text may run in a thread; they leave the GIL to others."""

    backend: Tokenizer
    prefix_ids: list[int] = field(default_factory=list)  # put before every text: BOS, for models that want one
    chat_template: ChatTemplate | None = None

    def encode(self, text: str, with_prefix: bool = True) -> list[int]:
        """The ids of a text, after the prefix unless the text spells it already. Raises ValueError on lone surrogates."""
        _check_unicode(text)
        # Not `encode`: that one holds the GIL and so stalls every stream.
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)
        ids = encoding.ids
        size = len(self.prefix_ids)
        return ids if not with_prefix or ids[:size] == self.prefix_ids else self.prefix_ids + ids

    def decode(self, token_ids: list[int], skips_special: bool = True) -> str:
        """The text of ids; unknown ones have none."""
        return self.backend.decode(token_ids, skip_special_tokens=skips_special)

    def encode_words(self, words: list[str]) -> list[list[int]]:
        """The ids of parts of texts, without the prefix. Raises ValueError on lone surrogates."""
        for word in words:
            _check_unicode(word)
        return [encoding.ids for encoding in self.backend.encode_batch(words, add_special_tokens=False)]

    def render(self, messages: list[dict[str, str]]) -> str:
        """A conversation as text. Raises ValueError when the model has no template, or it refuses the messages."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template; start the engine with --chat-template FILE, or send a prompt")
        for message in messages:
            _check_unicode(message["content"])
        return self.chat_template.render(messages)

    def detokenizer(self, prompt_ids: list[int], skips_special: bool = True) -> Detokenizer:
        """For the output that follows a prompt."""
        return Detokenizer(self.backend, self.visible_ids if skips_special else self.known_ids, self.token_bytes.fallback_ids, prompt_ids)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What single tokens add to a text."""
        return TokenBytes(self.backend)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Text -> id of the tokens that decode to nothing."""
        return {token.content: index for index, token in self.backend.get_added_tokens_decoder().items() if token.special}

    @cached_property
    def visible_ids(self) -> frozenset[int]:
        """The ids that decode to text."""
        return self.known_ids - frozenset(self.special_ids.values())

    @cached_property
    def known_ids(self) -> frozenset[int]:
        """All ids."""
        return frozenset(self.backend.get_vocab().values())

    @cached_property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self.backend.get_vocab().values(), default=-1) + 1


def load_tokenizer(config: EngineConfig) -> tuple[ModelTokenizer | None, frozenset[int]]:
    """The model's tokenizer, None where it has none, and its end-of-sequence ids.

    Raises ValueError naming the file that cannot be used.
    """
    if config.executor == "checksum":
        return None, frozenset()
    path = Path(config.model)
    if path.is_dir():
        return _load_folder(path, config)
    if path.suffix == ".gguf":
        return _load_gguf(path, config)
    raise ValueError(f"--model must be a folder or a .gguf file, got {config.model}")


class EndIds(msgspec.Struct, frozen=True):
    """What config.json and generation_config.json say of the ends of texts."""

    # A row has room for so many beside a request's own stop ids; Llama 3, which has most, has three.
    eos_token_id: TokenId | Annotated[list[TokenId], msgspec.Meta(max_length=12)] | None = None

    def as_set(self) -> frozenset[int]:
        """One id, several or none, as a set."""
        ids = self.eos_token_id
        return frozenset(() if ids is None else ids if isinstance(ids, list) else [ids])


class AddedText(msgspec.Struct, frozen=True):
    """A special token that is described by more than its text."""

    content: str


class NamedTemplate(msgspec.Struct, frozen=True):
    """One of several chat templates."""

    name: str
    template: str


class TokenizerSettings(msgspec.Struct, frozen=True):
    """The keys of tokenizer_config.json that matter here."""

    bos_token: str | AddedText | None = None
    eos_token: str | AddedText | None = None
    unk_token: str | AddedText | None = None
    pad_token: str | AddedText | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[NamedTemplate] | None = None

    def names(self) -> dict[str, str]:
        """The texts of the special tokens that are named."""
        given = {name: getattr(self, name) for name in SPECIAL_NAMES}
        return {name: token.content if isinstance(token, AddedText) else token for name, token in given.items() if token}


def _load_folder(folder: Path, config: EngineConfig) -> tuple[ModelTokenizer | None, frozenset[int]]:
    end_ids = frozenset.union(*(read_json(folder / name, EndIds).as_set() for name in ("config.json", "generation_config.json")))
    file = folder / "tokenizer.json"
    if not file.exists():
        log.warning("%s does not exist: prompts and outputs are token ids only", file)
        return None, end_ids
    settings = read_json(folder / "tokenizer_config.json", TokenizerSettings)
    backend = _read_backend(file)
    names = settings.names()
    end_ids |= _known_id(backend, names.get("eos_token"))
    template = config.chat_template or _template_source(folder, settings)
    return (
        ModelTokenizer(
            backend=backend,
            prefix_ids=_prefix_ids(backend, settings.add_bos_token, names.get("bos_token")),
            chat_template=_compiled(template, names, folder),
        ),
        end_ids,
    )


def _load_gguf(path: Path, config: EngineConfig) -> tuple[ModelTokenizer | None, frozenset[int]]:
    metadata = read_header(path).metadata
    try:
        vocabulary = msgspec.convert(metadata, GgufVocabulary)
        end_ids = vocabulary.end_ids()
        if vocabulary.model is None:
            log.warning("%s holds no tokenizer: prompts and outputs are token ids only", path)
            return None, end_ids
        backend = build_tokenizer(vocabulary)
    except (ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from None
    ids = {"bos_token": vocabulary.bos_token_id, "eos_token": vocabulary.eos_token_id}
    names = {name: text for name, index in ids.items() if index is not None and (text := backend.id_to_token(index)) is not None}
    # Files from before the flag: llama.cpp puts BOS before sentencepiece texts.
    add_bos = vocabulary.model == "llama" if vocabulary.add_bos_token is None else vocabulary.add_bos_token
    return (
        ModelTokenizer(
            backend=backend,
            prefix_ids=[vocabulary.bos_token_id] if add_bos and "bos_token" in names else [],
            chat_template=_compiled(config.chat_template or vocabulary.chat_template, names, path),
        ),
        end_ids,
    )


def _compiled(template: str | None, names: dict[str, str], path: Path) -> ChatTemplate | None:
    try:
        return ChatTemplate(template, names) if template else None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _known_id(backend: Tokenizer, text: str | None) -> frozenset[int]:
    index = backend.token_to_id(text) if text else None
    return frozenset(() if index is None else [index])


def _read_backend(file: Path) -> Tokenizer:
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{file} cannot be read: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _prefix_ids(backend: Tokenizer, add_bos: bool | None, bos_token: str | None) -> list[int]:
    """What the tokenizer puts before a text; `add_bos` of the settings has the last word. What it puts after is left out: the
    model is to go on from there."""
    bare, dressed = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    start = next((index for index in range(len(dressed)) if dressed[index : index + len(bare)] == bare), 0)
    prefix = dressed[:start]
    bos = backend.token_to_id(bos_token) if bos_token else None
    if add_bos is True and bos is not None and bos not in prefix:
        return [bos, *prefix]
    if add_bos is False:
        return [token for token in prefix if token != bos]
    return prefix


def _template_source(folder: Path, settings: TokenizerSettings) -> str | None:
    """From its own file, or the settings: one text, or a list of named ones of which "default" is for chats."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8: {error}") from None
    template = settings.chat_template
    if isinstance(template, list):
        return {entry.name: entry.template for entry in template}.get("default")
    return template


def read_json(file: Path, kind: type[Settings]) -> Settings:
    """The keys of `kind` in a JSON object; all are left out when there is no file."""
    if not file.exists():
        return kind()
    try:
        return msgspec.convert(json.loads(file.read_bytes()), kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"{file}: {error}") from None


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text holds a lone surrogate at character {error.start}") from None
