"""Preempted requests whose last tokens are still in flight."""

from collections.abc import Iterator

import numpy as np

from protocol.messages import NO_TOKEN, FinishReason
from scheduler.arrivals import Arrivals
from scheduler.table import Request


class Draining:
    """Requests by the generation of the row that they lost. Invariant: each still has tokens in flight."""

    def __init__(self) -> None:
        self._by_generation: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._by_generation)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_generation.values())

    def add(self, generation: int, request: Request) -> None:
        """A request has lost its row."""
        self._by_generation[generation] = request

    def get(self, generation: int) -> Request | None:
        """Who waits for the tokens of a generation."""
        return self._by_generation.get(generation)

    def remove(self, request: Request) -> None:
        """Forget a request: its tokens in flight will be dropped."""
        self._by_generation = {generation: other for generation, other in self._by_generation.items() if other is not request}

    def accept(
        self, generations: np.ndarray, tokens: np.ndarray, arrivals: Arrivals
    ) -> Iterator[tuple[Request, FinishReason | None]]:
        """Late tokens, into arrivals; yields the requests that have all of theirs, or end with one, and why.

        A token of a generation that nobody waits for came after a stop: dropped.
        """
        for generation, token in zip(generations.tolist(), tokens.tolist(), strict=True):
            request = self._by_generation.get(generation)
            if request is None:
                continue
            request.num_in_flight -= 1
            reason = _append(request, token)
            if token != NO_TOKEN:
                arrivals.add(request.frontend, request.handle, token)
            if reason is not None or request.num_in_flight == 0:
                del self._by_generation[generation]
                yield request, reason

    def check(self) -> None:
        """Assert the invariant."""
        assert all(request.num_in_flight > 0 for request in self)


def _append(request: Request, token: int) -> FinishReason | None:
    """Add a token to a request without a row; returns why it ends with it, if it does."""
    if token == NO_TOKEN:
        return "error"
    request.tokens = np.append(request.tokens, np.int32(token))
    if token in request.end_ids:
        return "stop"
    return "length" if len(request.tokens) >= request.limit else None
