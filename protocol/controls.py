"""Sampling controls that are longer than a number: biases, allowed ids, bad words. What a client may ask for, and a row's form of it."""

import msgspec

# The limits on what a client may ask for.
MAX_BIASES = 300
HIGHEST_BIAS = 100.0
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_BAD_WORD_TOKENS = 16
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS  # a word as it is given, and after a space


class RowControls(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The controls of one row beside the numbers in its RowSampling; ids are packed int32.

    A row without any control has none of these. `tokens` are added at each admission to a row, where they are needed.
    """

    bias_ids: bytes = b""  # distinct
    bias_values: bytes = b""  # little-endian float32
    allowed_ids: bytes = b""  # empty: all
    bad_words: list[bytes] = []  # sequences of 1 to MAX_BAD_WORD_TOKENS ids whose last one may not follow the others in the output
    end_ids: bytes = b""  # not to be sampled before min_tokens
    needs_tokens: bool = False  # for penalties or bad words
    tokens: bytes = b""  # known ones: the prompt, and the output so far


def bias_by_id(logit_bias: dict[int | str, float] | None) -> dict[int, float]:
    """Biases with numbers as keys: in JSON they are text. Raises ValueError for any other text, and for an id that is given twice."""
    biases = {_as_id(key): value for key, value in (logit_bias or {}).items()}
    if len(biases) != len(logit_bias or {}):
        raise ValueError("logit_bias must name each id once")
    return biases


def _as_id(key: int | str) -> int:
    if isinstance(key, int):
        return key
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        raise ValueError(f"logit_bias must have token ids as keys, got {key[:40]!r}")
    return int(key)


def check_logit_bias(logit_bias: dict[int | str, float] | None, vocab_size: int) -> None:
    """Raise ValueError for the first thing out of bounds."""
    if len(logit_bias or {}) > MAX_BIASES:
        raise ValueError(f"logit_bias takes at most {MAX_BIASES} entries, got {len(logit_bias)}")
    for token, value in bias_by_id(logit_bias).items():
        if not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias must have ids between 0 and {vocab_size - 1} as keys, got {token}")
        if not -HIGHEST_BIAS <= value <= HIGHEST_BIAS:  # written so that NaN fails too
            raise ValueError(f"logit_bias must hold values between {-HIGHEST_BIAS} and {HIGHEST_BIAS}, got {value} for id {token}")


def check_texts(field: str, texts: list[str], most: int, most_bytes: int) -> None:
    """Raise ValueError for too many strings, an empty one or a long one."""
    if len(texts) > most:
        raise ValueError(f"{field} takes at most {most} strings, got {len(texts)}")
    for text in texts:
        size = len(text.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= most_bytes:
            raise ValueError(f"{field} must hold strings of 1 to {most_bytes} bytes, got one of {size}")
