"""Counts what the steps of a simulation really run: passes, tokens, and joins of each request."""

from collections import Counter
from collections.abc import Callable

from protocol.messages import decode_to_worker, unpack
from tests.simulation import Simulation


class StepWatch:
    """Looks into every message to the worker of a simulation.

    `tokens` holds how many tokens each step runs, `handles` which requests take part in it; `joins` counts how often each was given a row.
    """

    def __init__(self, sim: Simulation):
        self.sim, self.run = sim, sim.worker.run
        self.tokens: list[int] = []
        self.handles: list[set[int]] = []
        self.joins: Counter[int] = Counter()
        self._decoding: set[int] = set()
        sim.worker.run = self._watch

    @property
    def num_passes(self) -> int:
        """Steps that ran any token."""
        return sum(count > 0 for count in self.tokens)

    def _watch(self, payload: bytes) -> Callable[[], bytes]:
        delta, requests = decode_to_worker(payload), self.sim.scheduler.table.requests
        self._decoding = (self._decoding | set(delta.decode_on)) - set(delta.decode_off)
        sizes = {chunk.row: len(unpack(chunk.tokens)) for chunk in delta.chunks}
        self.tokens.append(len(self._decoding) + sum(sizes.values()))
        self.handles.append({requests[row].handle for row in self._decoding | sizes.keys()})
        self.joins.update(requests[join.row].handle for join in delta.joins)
        return self.run(payload)
