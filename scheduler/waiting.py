"""The queue: requests that wait for a row, the most urgent first, and choices held back until their prompt has been computed once."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.table import Request


def rank(request: Request) -> tuple[int, int]:
    """Who comes first, in the queue and among the running ones: the lowest priority number, then the oldest."""
    return request.priority, request.arrival


class WaitingQueue:
    """Requests without a row, save those that wait for tokens in flight.

    Invariant: a request is ready or held, not both; `_ready` is in order of rank; `unstarted` holds, oldest first, those that the queue
    timeout is for: no choice of their request has ever had a row.
    """

    def __init__(self) -> None:
        self._ready: list[Request] = []
        self._held: dict[Request, list[Request]] = {}  # by the choice that computes their prompt
        self.unstarted: dict[Request, None] = {}
        self.num_tokens = 0  # of ready requests: known tokens that no other choice has computed for them

    def __len__(self) -> int:
        return len(self._ready) + sum(map(len, self._held.values()))

    def __iter__(self) -> Iterator[Request]:
        yield from self._ready
        for held in self._held.values():
            yield from held

    @property
    def head(self) -> Request | None:
        """The request whose turn it is. Those held back are in nobody's way."""
        return self._ready[0] if self._ready else None

    @property
    def leaders(self) -> list[Request]:
        """Choices that others are held back for."""
        return list(self._held)

    def add_new(self, choices: list[Request]) -> None:
        """The choices of a new request; those with tokens to share are held back for the first."""
        self.unstarted.update(dict.fromkeys(choices))
        held = [choice for choice in choices[1:] if choice.num_shared]
        if held:
            self._held[choices[0]] = held
        for choice in choices[:1] if held else choices:
            self.add(choice)

    def add(self, request: Request) -> None:
        """Let a request wait for a row."""
        insort(self._ready, request, key=rank)
        self.num_tokens += _weight(request)

    def pop(self) -> None:
        """Take out the head, which has been given a row; its request has started."""
        request = self._ready.pop(0)
        self.num_tokens -= _weight(request)
        for choice in (request, *self._held.get(request, ())):
            self.unstarted.pop(choice, None)

    def remove(self, request: Request) -> None:
        """Take out a request, ready or held."""
        self.unstarted.pop(request, None)
        place = bisect_left(self._ready, rank(request), key=rank)
        if place < len(self._ready) and self._ready[place] is request:
            del self._ready[place]
            self.num_tokens -= _weight(request)
            return
        (leader,) = [leader for leader, held in self._held.items() if request in held]
        self._held[leader].remove(request)
        if not self._held[leader]:
            del self._held[leader]

    def release(self, leader: Request) -> None:
        """The prompt's blocks can be found: those held back may have rows."""
        for choice in self._held.pop(leader, ()):
            self.add(choice)

    def leader_ended(self, leader: Request) -> None:
        """The first of those held back computes the prompt instead."""
        if held := self._held.pop(leader, None):
            first, *rest = held
            first.num_shared = 0
            self.add(first)
            if rest:
                self._held[first] = rest

    def check(self) -> None:
        """Assert the invariant."""
        everyone = list(self)
        assert len(set(everyone)) == len(everyone) == len(self)
        assert [rank(request) for request in self._ready] == sorted(map(rank, self._ready))
        assert self.num_tokens == sum(map(_weight, self._ready))
        assert all(request in set(everyone) and not request.was_admitted for request in self.unstarted)
        assert all(held for held in self._held.values())


def _weight(request: Request) -> int:
    return len(request.tokens) - request.num_shared
