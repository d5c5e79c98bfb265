"""A model's tokenizer: text to ids, conversations to ids, and what its files say about the ends of texts.

Loaded without torch: importing transformers' AutoTokenizer would pull it in and take seconds.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from frontend.chat_template import ChatTemplate
from frontend.detokenizer import Detokenizer
from frontend.gguf_header import read_metadata
from frontend.gguf_tokenizer import build_tokenizer
from protocol.config import EngineConfig

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class ModelTokenizer:
    """What the doors need of a tokenizer. Methods that take text may run in a thread; they leave the GIL to others."""

    backend: Tokenizer
    prefix_ids: list[int] = field(default_factory=list)  # put before every text: BOS, for models that want one
    chat_template: ChatTemplate | None = None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, after the prefix unless the text spells it already. Raises ValueError on lone surrogates."""
        _check_unicode(text)
        # Not `encode`: that one holds the GIL and so stalls every stream.
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)
        ids = encoding.ids
        size = len(self.prefix_ids)
        return ids if ids[:size] == self.prefix_ids else self.prefix_ids + ids

    def render(self, messages: list[dict[str, str]]) -> str:
        """A conversation as text. Raises ValueError when the model has no template, or it refuses the messages."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template; send prompt or prompt_ids")
        for message in messages:
            _check_unicode(message["content"])
        return self.chat_template.render(messages)

    def detokenizer(self, prompt_ids: list[int]) -> Detokenizer:
        """For the output that follows a prompt."""
        return Detokenizer(self.backend, self.visible_ids, prompt_ids)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Text -> id of the tokens that decode to nothing."""
        return {token.content: index for index, token in self.backend.get_added_tokens_decoder().items() if token.special}

    @cached_property
    def visible_ids(self) -> frozenset[int]:
        """The ids that decode to text."""
        return frozenset(self.backend.get_vocab().values()) - frozenset(self.special_ids.values())

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
        return _load_folder(path)
    if path.suffix == ".gguf":
        return _load_gguf(path)
    raise ValueError(f"--model must be a folder or a .gguf file, got {config.model}")


def _load_folder(folder: Path) -> tuple[ModelTokenizer | None, frozenset[int]]:
    settings = _read_json(folder / "tokenizer_config.json")
    end_ids = _id_set(_read_json(folder / "config.json").get("eos_token_id"))
    end_ids |= _id_set(_read_json(folder / "generation_config.json").get("eos_token_id"))
    file = folder / "tokenizer.json"
    if not file.exists():
        return None, end_ids
    backend = _read_backend(file)
    names = {name: _token_text(settings[name]) for name in SPECIAL_NAMES if settings.get(name)}
    end_ids |= _id_set(backend.token_to_id(names.get("eos_token", "")))
    template = _template_source(folder, settings)
    return (
        ModelTokenizer(
            backend=backend,
            prefix_ids=_prefix_ids(backend, settings.get("add_bos_token"), names.get("bos_token")),
            chat_template=ChatTemplate(template, names) if template else None,
        ),
        end_ids,
    )


def _load_gguf(path: Path) -> tuple[ModelTokenizer | None, frozenset[int]]:
    metadata = read_metadata(path)
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    end_ids = frozenset(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None)
    if "tokenizer.ggml.model" not in metadata:
        return None, end_ids
    try:
        backend = build_tokenizer(metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    # Files from before the flag: llama.cpp puts BOS before sentencepiece texts.
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", metadata["tokenizer.ggml.model"] == "llama")
    names = {f"{name}_token": backend.id_to_token(ids[name]) for name in ("bos", "eos") if ids[name] is not None}
    template = metadata.get("tokenizer.chat_template")
    return (
        ModelTokenizer(
            backend=backend,
            prefix_ids=[ids["bos"]] if add_bos and ids["bos"] is not None else [],
            chat_template=ChatTemplate(template, names) if template else None,
        ),
        end_ids,
    )


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


def _template_source(folder: Path, settings: dict[str, object]) -> str | None:
    """From its own file, or the settings: one text, or a list of named ones of which "default" is for chats."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _read_json(file: Path) -> dict[str, object]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return content


def _token_text(token: str | dict[str, object]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _id_set(ids: int | list[int] | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text holds a lone surrogate at character {error.start}") from None
