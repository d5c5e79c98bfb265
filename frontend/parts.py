"""The parts of a streamed answer, joined: the same at both ends of a door. Needs what a client needs, and no more."""

from collections.abc import Sequence
from typing import Protocol

from protocol.logprobs import TokenLogprob


class Part(Protocol):
    """What comes for a choice at once: a door's delta, a client's output."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None


Joined = tuple[str, list[int], list[TokenLogprob] | None, list[TokenLogprob | None] | None]


def join_parts(parts: Sequence[Part]) -> Joined:
    """Text, ids, their scores and the prompt's, as if all had come at once."""
    scores = None if parts[-1].logprobs is None else [score for part in parts for score in part.logprobs]
    prompts = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
    token_ids = [token for part in parts for token in part.token_ids]
    return "".join(part.text for part in parts), token_ids, scores, prompts[0] if prompts else None
