"""Scores of tokens: their log-probabilities, ranks, and the best ids at their place. How workers write them, what clients get.

X scores of W 32-bit words each: the rank (1 is the best), the token's log-probability, the ids of the best tokens, and theirs.
"""

import msgspec
import numpy as np

MAX_LOGPROBS = 20
NUM_WORDS = 2 + 2 * MAX_LOGPROBS
SCORE_BYTES = 4 * NUM_WORDS
NO_ID = -1  # in the place of a best id where the vocabulary has fewer than MAX_LOGPROBS


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's score: the natural logarithm of its probability before penalties, biases, temperature and filters."""

    token_id: int
    logprob: float
    rank: int  # 1: no token was more likely
    top: list[tuple[int, float]]  # the most likely ids with theirs, best first, as many as asked for


def read_score(token: int, data: bytes, num_top: int) -> TokenLogprob:
    """A worker's score of a token, with the num_top best."""
    words = np.frombuffer(data, dtype="<i4")
    values = words.view("<f4")
    ids = words[2 : 2 + num_top]
    best = values[2 + MAX_LOGPROBS :][:num_top]
    top = [(token_id, value) for token_id, value in zip(ids.tolist(), best.tolist()) if token_id != NO_ID]
    return TokenLogprob(token, float(values[1]), int(words[0]), top)
