"""A tokenizer from the metadata of a GGUF file: byte-level BPE ("gpt2") or sentencepiece BPE ("llama")."""

from typing import Annotated

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# tokenizer.ggml.pre -> how text is split before merging; None is GPT-2's own split. smollm is read as transformers reads it.
# SmolLM's training also cut digits off the spaces before them, which only shows where two or more spaces precede a digit.
SPLITS = {
    "default": None,
    "gpt-2": None,
    "gpt2": None,
    "smollm": None,
    "qwen2": QWEN2_SPLIT,
    "deepseek-r1-qwen": QWEN2_SPLIT,
    "llama3": LLAMA3_SPLIT,
    "llama-v3": LLAMA3_SPLIT,
    "llama-bpe": LLAMA3_SPLIT,
}


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class GgufVocabulary(msgspec.Struct, frozen=True, rename=lambda name: f"tokenizer.{'' if name == 'chat_template' else 'ggml.'}{name}"):
    """The metadata that describes a tokenizer. None, and no merges: not given."""

    model: str | None = None
    pre: str = "default"
    tokens: list[str] | None = None
    token_type: list[int] = []
    scores: list[float] | None = None
    merges: list[str] = []
    add_space_prefix: bool = True
    add_bos_token: bool | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | None = None
    eot_token_id: TokenId | None = None
    eom_token_id: TokenId | None = None
    unknown_token_id: TokenId | None = None
    padding_token_id: TokenId | None = None
    chat_template: str | None = None

    def end_ids(self) -> frozenset[int]:
        """The ids that end a text."""
        return frozenset({self.eos_token_id, self.eot_token_id, self.eom_token_id} - {None})

    def check(self) -> None:
        """Raise ValueError, with the key, for what would make the tokenizers library fail or panic."""
        if self.model not in BUILDERS:
            raise ValueError(f"tokenizer.ggml.model must be one of {', '.join(BUILDERS)}, got {self.model!r}")
        if not self.tokens:
            raise ValueError("tokenizer.ggml.tokens is missing")
        for name in ("token_type", "scores"):
            values = getattr(self, name)
            if values and len(values) != len(self.tokens):
                raise ValueError(f"tokenizer.ggml.{name} holds {len(values)} numbers for {len(self.tokens)} tokens")


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """The tokenizer that is described, adding nothing to a text. Raises ValueError when its kind is not supported."""
    vocabulary.check()
    tokenizer = BUILDERS[vocabulary.model](vocabulary)
    _add_tokens(tokenizer, vocabulary)
    return tokenizer


def _byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    if vocabulary.pre not in SPLITS:
        raise ValueError(f"tokenizer.ggml.pre must be one of {', '.join(SPLITS)}, got {vocabulary.pre!r}")
    vocab = {_spell(token): index for index, token in enumerate(vocabulary.tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    for parts in merges:
        if len(parts) != 2 or not vocab.keys() >= {*parts, "".join(parts)}:
            raise ValueError(f"tokenizer.ggml.merges joins {' and '.join(map(repr, parts))}, which are no tokens or make none")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(SPLITS[vocabulary.pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(split: str | None) -> pre_tokenizers.PreTokenizer:
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = _merges_from_scores(vocab, vocabulary.scores or [0.0] * len(vocabulary.tokens))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    space_before_text = vocabulary.add_space_prefix
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if space_before_text else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_before_text:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose whole scores best; BPE wants that as a list of merges, best first."""
    merges = []
    for whole, index in vocab.items():
        cuts = [(whole[:size], whole[size:]) for size in range(1, len(whole))]
        known = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(scores[index], pair) for pair in known]
    merges.sort(key=lambda merge: (merge[0], len(merge[1][0]), len(merge[1][1])), reverse=True)
    return [pair for _score, pair in merges]


def _add_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Keep control tokens and user-defined ones whole; only the former are special."""
    tokens, types = vocabulary.tokens, vocabulary.token_type
    control = {index for index, token_type in enumerate(types) if token_type == CONTROL}
    named = {vocabulary.bos_token_id, vocabulary.eos_token_id, vocabulary.unknown_token_id, vocabulary.padding_token_id}
    special = sorted(control | {index for index in named if index is not None and index < len(tokens)})
    if vocabulary.model == "gpt2":  # a control token outside the byte alphabet is a converter's mislabel and would get a new id
        special = [index for index in special if _spell(tokens[index]) == tokens[index]]
    tokenizer.add_special_tokens([AddedToken(tokens[index], normalized=False, special=True) for index in special])
    whole = [token for token, token_type in zip(tokens, types) if token_type == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in whole if tokenizer.token_to_id(token) is not None])


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as the next free code points from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
BYTE_LETTERS = frozenset(BYTE_ALPHABET.values())


def _spell(token: str) -> str:
    """The token in the byte alphabet; some files hold a few tokens as plain text."""
    if BYTE_LETTERS.issuperset(token):
        return token
    return "".join(BYTE_ALPHABET[byte] for byte in token.encode())
