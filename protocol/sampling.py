"""Sampling parameters: what a client may ask for, and the part of it that a worker row needs.

Bounds live in one table, so that the doors and the tests read the same numbers.
"""

import hashlib
import struct
from typing import Annotated

import msgspec

from protocol.controls import MAX_BAD_WORD_BYTES, MAX_BAD_WORDS, check_logit_bias, check_texts
from protocol.logprobs import MAX_LOGPROBS

# field -> (lowest, highest), both allowed. top_k of 0 or -1 and top_p of 1 switch the filter off; top_p of 0 keeps one token.
BOUNDS: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "temperature": (0.0, 1000.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, 128),
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
MAX_STOP_STRINGS = 4
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 32
MAX_END_IDS = MAX_STOP_TOKEN_IDS + 32  # a model's own end ids beside the request's

# Below this a temperature is greedy: the quotient would only add rounding to the same choice.
GREEDY_TEMPERATURE = 1e-5

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client asks for. None means the server's default; a value given always wins."""

    max_tokens: int | None = None  # None: as many as the context has room for
    temperature: float | None = None  # default 1; 0 is greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None  # None: a fresh random seed
    n: int | None = None  # choices, default 1; each has a seed of its own, see `choice_seed`
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False  # the stop string or stop id that ended the text, at its end
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # leave them out of the text
    repetition_penalty: float | None = None  # default 1: off; of ids in the prompt or the output
    presence_penalty: float | None = None  # default 0: off; once for each id in the output
    frequency_penalty: float | None = None  # default 0: off; for each time that an id is in the output
    logit_bias: dict[int | str, float] | None = None  # by token id; JSON has it as text
    bad_words: list[str] | None = None  # not in the output as the tokenizer spells them, alone or after a space
    allowed_token_ids: list[int] | None = None  # None: all
    min_tokens: int | None = None  # no end of sequence, stop id or stop string before so many
    logprobs: int | None = None  # with each token its log-probability, and those of so many best ones; None: without
    prompt_logprobs: int | None = None  # the same for the prompt's tokens

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list, whichever way they were given."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class RowSampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The resolved parameters of one row; the defaults are greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Int64 = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0

    @property
    def has_penalty(self) -> bool:
        """Whether it matters which tokens are there already."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def check_bounds(field: str, value: float | None, name: str | None = None) -> None:
    """Raise ValueError for a value out of the field's bounds; `name` is what the client calls it."""
    low, high = BOUNDS[field]
    if value is not None and not low <= value <= high:  # written so that NaN fails too
        raise ValueError(f"{name or field} must be between {low} and {high}, got {value}")


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError naming the field, its value and its limit for the first field out of bounds."""
    for field in BOUNDS:
        check_bounds(field, getattr(params, field))
    for field in ("logprobs", "prompt_logprobs"):
        if (getattr(params, field) or 0) > vocab_size:
            raise ValueError(f"{field} must be at most {vocab_size}, the size of the vocabulary, got {getattr(params, field)}")
    check_texts("stop", params.stop_strings, MAX_STOP_STRINGS, MAX_STOP_BYTES)
    _check_ids("stop_token_ids", params.stop_token_ids or [], MAX_STOP_TOKEN_IDS, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or [], vocab_size, vocab_size)
    if params.allowed_token_ids == []:
        raise ValueError("allowed_token_ids is empty; it takes at least one id")
    check_logit_bias(params.logit_bias, vocab_size)
    check_texts("bad_words", params.bad_words or [], MAX_BAD_WORDS, MAX_BAD_WORD_BYTES)


def row_sampling(params: SamplingParams, random_seed: int) -> RowSampling:
    """Resolve checked parameters for the worker; random_seed serves a request that names none."""
    temperature = 1.0 if params.temperature is None else params.temperature
    return RowSampling(
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
        top_k=max(0, params.top_k or 0),
        top_p=1.0 if params.top_p is None else params.top_p,
        min_p=params.min_p or 0.0,
        seed=random_seed if params.seed is None else params.seed,
        repetition_penalty=1.0 if params.repetition_penalty is None else params.repetition_penalty,
        presence_penalty=params.presence_penalty or 0.0,
        frequency_penalty=params.frequency_penalty or 0.0,
        min_tokens=params.min_tokens or 0,
    )


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: its own for choice 0, so that n changes nothing there.

    For the others the first 8 bytes of SHA-256 over seed and index, all three as little-endian signed 64-bit integers. A request with
    this seed and n = 1 gives the same tokens as the choice.
    """
    if index == 0:
        return seed
    return struct.unpack("<q", hashlib.sha256(struct.pack("<qq", seed, index)).digest()[:8])[0]


def _check_ids(field: str, ids: list[int], most: int, vocab_size: int) -> None:
    if len(ids) > most:
        raise ValueError(f"{field} takes at most {most} ids, got {len(ids)}")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{field} must hold ids between 0 and {vocab_size - 1}, got {token}")
