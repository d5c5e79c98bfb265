"""Which preempted requests have their KV in host memory, and where.

H = places, of one block each
"""

import numpy as np

from protocol.messages import Swap, pack
from scheduler.intake import Limits
from scheduler.policy import blocks_for, swap_is_cheaper
from scheduler.table import Request


class SwapSpace:
    """Places in host memory. Invariant: each is free (in `_free`) or one of a request's `saved_places`.

    Copies are planned here and carried out by the worker in this order, before the step whose delta names them; so what one gives free
    the next one may take at once.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self.prompt_token_s = 0.0  # seconds to compute a known token anew; 0: not measured yet
        self._free = list(range(limits.num_host_blocks - 1, -1, -1))
        self._planned: list[Swap] = []
        self.num_out = self.num_in = 0  # blocks so far

    @property
    def num_free(self) -> int:
        return len(self._free)

    def save(self, request: Request, blocks: np.ndarray, num_computed: int) -> None:
        """A request loses its blocks: have those of computed tokens copied out, where there is room and it pays."""
        assert request.saved_places is None
        blocks = blocks[: blocks_for(num_computed, self.limits.block_size)]
        if len(blocks) == 0 or len(blocks) > self.num_free or not self._pays(len(blocks), num_computed):
            return
        places = [self._free.pop() for _ in blocks]
        request.saved_places, request.num_saved = np.array(places, dtype=np.int32), num_computed
        self._planned.append(Swap(True, pack(blocks), pack(places)))
        self.num_out += len(blocks)

    def _pays(self, num_blocks: int, num_tokens: int) -> bool:
        if self.limits.preemption_mode != "auto":
            return self.limits.preemption_mode == "swap"
        return swap_is_cheaper(num_blocks, num_tokens, self.limits.block_copy_s, self.prompt_token_s)

    def restore(self, request: Request, blocks: np.ndarray, num_shared: int) -> int:
        """A request has blocks again, of which num_shared were found computed: have the others copied in. Returns its computed tokens."""
        num_found = num_shared * self.limits.block_size
        if request.saved_places is None or request.num_saved <= num_found:
            self.drop(request)
            return num_found
        places, num_saved = request.saved_places[num_shared:], request.num_saved
        assert num_saved < len(request.tokens), "a token is left to compute"
        self._planned.append(Swap(False, pack(blocks[num_shared : num_shared + len(places)]), pack(places)))
        self.num_in += len(places)
        self.drop(request)
        return num_saved

    def drop(self, request: Request) -> None:
        """What was saved is not needed any more. Harmless when nothing was."""
        if request.saved_places is not None:
            self._free += request.saved_places[::-1].tolist()
            request.saved_places = None

    def take_planned(self) -> list[Swap]:
        """The copies of the step that is being planned."""
        planned, self._planned = self._planned, []
        return planned

    def check(self, requests: list[Request]) -> None:
        """Assert the invariant over all requests that there are."""
        saved = [request.saved_places for request in requests if request.saved_places is not None]
        places = np.concatenate([np.array(self._free, dtype=np.int32), *saved])
        assert sorted(places.tolist()) == list(range(self.limits.num_host_blocks))
        assert all(request.saved_places is None for request in requests if request.row is not None)
