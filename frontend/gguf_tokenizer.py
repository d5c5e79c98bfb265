"""A tokenizer from the metadata of a GGUF file: byte-level BPE ("gpt2") or sentencepiece BPE ("llama")."""

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


def build_tokenizer(metadata: dict[str, object]) -> Tokenizer:
    """The tokenizer that `metadata` describes, adding nothing to a text. Raises ValueError when its kind is not supported."""
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in builders:
        raise ValueError(f"tokenizer.ggml.model must be one of {', '.join(builders)}, got {kind!r}")
    if "tokenizer.ggml.tokens" not in metadata:
        raise ValueError("tokenizer.ggml.tokens is missing")
    tokenizer = builders[kind](metadata)
    _add_tokens(tokenizer, metadata, kind)
    return tokenizer


def _byte_level(metadata: dict[str, object]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise ValueError(f"tokenizer.ggml.pre must be one of {', '.join(SPLITS)}, got {pre!r}")
    vocab = {_spell(token): index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(SPLITS[pre])
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


def _sentencepiece(metadata: dict[str, object]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges_from_scores(vocab, metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens)))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    space_before_text = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if space_before_text else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_before_text:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


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


def _add_tokens(tokenizer: Tokenizer, metadata: dict[str, object], kind: str) -> None:
    """Keep control tokens and user-defined ones whole; only the former are special."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [])
    control = {index for index, token_type in enumerate(types) if token_type == CONTROL}
    named = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    special = sorted(control | {index for index in named if index is not None and index < len(tokens)})
    if kind == "gpt2":  # a control token outside the byte alphabet is a converter's mislabel and would get a new id
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
