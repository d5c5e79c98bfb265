"""Log-probabilities that requests asked for: what a step scores, and whose the scores are."""

from collections.abc import Iterator
from dataclasses import dataclass

from protocol.logprobs import SCORE_BYTES
from protocol.messages import Scores, pack
from scheduler.table import Request


@dataclass(frozen=True)
class PromptPart:
    """The prompt tokens that a chunk scores; the first num_known of them were scored before, by a row that was taken away."""

    request: Request
    num_scored: int
    num_known: int


@dataclass(frozen=True)
class PlannedScores:
    """What a step scores: the tokens at some places among its samples, then parts of prompts."""

    samples: list[int]
    parts: list[PromptPart]

    def split(self, data: bytes, receivers: dict[int, Request]) -> Iterator[tuple[int, Scores]]:
        """Each frontend's part of a result; receivers has the requests that get the tokens at `samples`, where one still does."""
        assert len(data) == SCORE_BYTES * (len(self.samples) + sum(part.num_scored for part in self.parts))
        for i, sample in enumerate(self.samples):
            if request := receivers.get(sample):
                yield request.frontend, Scores(request.handle, False, data[SCORE_BYTES * i :][:SCORE_BYTES])
        end = SCORE_BYTES * len(self.samples)
        for part in self.parts:
            start, end = end + SCORE_BYTES * part.num_known, end + SCORE_BYTES * part.num_scored
            yield part.request.frontend, Scores(part.request.handle, True, data[start:end])


def take_targets(request: Request, start: int, size: int) -> tuple[bytes, PromptPart | None]:
    """What to score in a chunk of `size` tokens from `start` on: the tokens, and what is still to be delivered of them."""
    known, end = request.num_prompt_scored, min(start + size, request.prompt_len - 1)
    if not request.is_prompt_scored or known >= end:
        return b"", None
    assert start <= known, "a prompt token would be left out"
    request.num_prompt_scored = end
    return pack(request.tokens[start + 1 : end + 1]), PromptPart(request, end - start, known - start)
