"""Sampling parameters: what a client may ask for, and the part of it that a worker row needs.

Bounds live in one table, so that the doors and the tests read the same numbers.
"""

from typing import Annotated

import msgspec

# field -> (lowest, highest), both allowed. top_k of 0 or -1 and top_p of 1 switch the filter off; top_p of 0 keeps one token.
BOUNDS: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "temperature": (0.0, 1000.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "seed": (-(2**63), 2**63 - 1),
}
MAX_STOP_STRINGS = 4
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 32

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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

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


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError naming the field, its value and its limit for the first field out of bounds."""
    for field, (low, high) in BOUNDS.items():
        value = getattr(params, field)
        if value is not None and not low <= value <= high:  # written so that NaN fails too
            raise ValueError(f"{field} must be between {low} and {high}, got {value}")
    _check_stops(params.stop_strings)
    _check_ids("stop_token_ids", params.stop_token_ids or [], MAX_STOP_TOKEN_IDS, vocab_size)


def row_sampling(params: SamplingParams, random_seed: int) -> RowSampling:
    """Resolve checked parameters for the worker; random_seed serves a request that names none."""
    temperature = 1.0 if params.temperature is None else params.temperature
    return RowSampling(
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
        top_k=max(0, params.top_k or 0),
        top_p=1.0 if params.top_p is None else params.top_p,
        min_p=params.min_p or 0.0,
        seed=random_seed if params.seed is None else params.seed,
    )


def _check_stops(stops: list[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
    for text in stops:
        size = len(text.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= MAX_STOP_BYTES:
            raise ValueError(f"stop must hold strings of 1 to {MAX_STOP_BYTES} bytes, got one of {size}")


def _check_ids(field: str, ids: list[int], most: int, vocab_size: int) -> None:
    if len(ids) > most:
        raise ValueError(f"{field} takes at most {most} ids, got {len(ids)}")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{field} must hold ids between 0 and {vocab_size - 1}, got {token}")
