"""The running requests, one row each, as columns: the bookkeeping of a step is a handful of vector operations.

R rows, L tokens of the longest context, B blocks of the longest context, E end ids, S tokens of a block.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from protocol.controls import RowControls
from protocol.sampling import MAX_END_IDS, RowSampling

NO_ID = -1  # in an end-id line: equal to no token


@dataclass(slots=True, eq=False)
class Request:
    """A request outside the table: waiting, or preempted with tokens still in flight.

    `tokens` are those known: the prompt and what has been generated. They move into the table on admission and back on preemption.
    """

    frontend: int
    handle: int
    arrival: int  # admission order; kept over preemptions, so that the oldest stays the oldest
    prompt_len: int
    tokens: np.ndarray
    limit: int  # tokens in all, the prompt included
    end_ids: np.ndarray
    sampling: RowSampling
    queued_at: float = 0.0  # seconds of the caller's clock
    priority: int = 0  # lower ones first; among equals the oldest
    num_shared: int = 0  # leading prompt tokens that the first choice of the same request computes for this one
    salt: bytes = b""  # requests share prefix blocks only with those of the same salt
    controls: RowControls | None = None
    is_scored: bool = False  # the log-probabilities of its tokens are wanted
    is_prompt_scored: bool = False
    is_stepwise: bool = False  # has no token planned while one is in flight
    num_prompt_scored: int = 0  # prompt tokens from the second on whose scores are delivered or in flight
    was_admitted: bool = False
    num_preemptions: int = 0
    refused_at: int = 0  # free blocks beyond one for each running row, when it last did not fit
    row: int | None = None
    num_in_flight: int = 0  # sampled tokens of a preempted request that are still to arrive
    saved_places: np.ndarray | None = None  # in host memory, where the KV of its first num_saved tokens lies
    num_saved: int = 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether prompt tokens that are to be scored are not yet: none may come from the prefix index."""
        return self.is_prompt_scored and self.num_prompt_scored < self.prompt_len - 1


class RequestTable:
    """Columns over the rows. A row is free where generation_R is 0.

    Invariant of a row in use: num_computed <= num_planned, num_known <= num_planned <= limit. The tokens between num_known and
    num_planned are placeholders: sampled by steps in flight, known to the worker only. A row decodes once num_computed has
    reached prefill_end, the number of tokens known when it was admitted.
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int):
        R, L, B = num_rows, max_model_len, -(-max_model_len // block_size)
        self.block_size = block_size
        self.generation_R = np.zeros(R, dtype=np.int64)
        self.arrival_R = np.zeros(R, dtype=np.int64)
        self.priority_R = np.zeros(R, dtype=np.int64)
        self.frontend_R = np.zeros(R, dtype=np.int32)
        self.handle_R = np.zeros(R, dtype=np.int64)
        self.num_known_R = np.zeros(R, dtype=np.int32)
        self.num_planned_R = np.zeros(R, dtype=np.int32)
        self.num_computed_R = np.zeros(R, dtype=np.int32)
        self.prefill_end_R = np.zeros(R, dtype=np.int32)
        self.limit_R = np.zeros(R, dtype=np.int32)
        self.is_scored_R = np.zeros(R, dtype=bool)
        self.is_stepwise_R = np.zeros(R, dtype=bool)
        self.num_blocks_R = np.zeros(R, dtype=np.int32)
        self.num_published_R = np.zeros(R, dtype=np.int32)  # leading blocks that the prefix index has been shown
        self.prefix_key: list[bytes] = [b""] * R  # the hash of those blocks
        self.num_end_ids = 0  # lines of end_ids_ER that any row has used
        # Rows side by side: comparing 2 ids of 1,024 rows takes 4 µs, 34 µs the other way round.
        self.end_ids_ER = np.full((MAX_END_IDS, R), NO_ID, dtype=np.int32)
        # Zeroed pages cost memory only once written, so the width may be the longest context.
        self.tokens_RL = np.zeros((R, B * block_size), dtype=np.int32)
        self._contents_RB = self.tokens_RL.view(np.dtype((np.void, 4 * block_size)))  # a block's tokens as one value
        self.block_table_RB = np.zeros((R, B), dtype=np.int32)
        self.requests: list[Request | None] = [None] * R
        self._free_rows = list(range(R))  # a heap: low rows first
        self._last_generation = 0

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_running(self) -> int:
        return len(self.requests) - len(self._free_rows)

    def admit(self, request: Request, blocks: np.ndarray, num_shared: int, prefix_key: bytes, num_computed: int) -> int:
        """Give the request a free row under a new generation. num_computed tokens are computed already; the first num_shared blocks, of
        hash prefix_key, are in the prefix index."""
        row = heapq.heappop(self._free_rows)
        self._last_generation += 1
        known = len(request.tokens)
        self.generation_R[row] = self._last_generation
        self.arrival_R[row] = request.arrival
        self.priority_R[row] = request.priority
        self.frontend_R[row] = request.frontend
        self.handle_R[row] = request.handle
        self.num_known_R[row] = self.num_planned_R[row] = self.prefill_end_R[row] = known
        self.num_computed_R[row] = num_computed
        self.num_published_R[row] = num_shared
        self.prefix_key[row] = prefix_key
        self.limit_R[row] = request.limit
        self.is_scored_R[row] = request.is_scored
        self.is_stepwise_R[row] = request.is_stepwise
        self.end_ids_ER[:, row] = NO_ID
        self.end_ids_ER[: len(request.end_ids), row] = request.end_ids
        self.num_end_ids = max(self.num_end_ids, len(request.end_ids))
        self.tokens_RL[row, :known] = request.tokens
        self.num_blocks_R[row] = 0
        self.append_blocks(row, blocks)
        self.requests[row] = request
        request.row = row
        return row

    def release(self, row: int) -> tuple[Request, np.ndarray]:
        """Free the row; returns its request, with all known tokens, and the blocks that it held."""
        request, blocks = self.requests[row], self.blocks(row).copy()
        assert request is not None
        request.tokens = self.tokens_RL[row, : self.num_known_R[row]].copy()
        request.row = None
        self.generation_R[row] = 0
        self.num_blocks_R[row] = 0
        self.requests[row] = None
        heapq.heappush(self._free_rows, row)
        return request, blocks

    def blocks(self, row: int) -> np.ndarray:
        """The row's blocks, in token order (a view)."""
        return self.block_table_RB[row, : self.num_blocks_R[row]]

    def append_blocks(self, row: int, blocks: np.ndarray) -> None:
        """Let the row hold more tokens."""
        held = self.num_blocks_R[row]
        self.block_table_RB[row, held : held + len(blocks)] = blocks
        self.num_blocks_R[row] += len(blocks)

    def lease_places(self, rows: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Up to `most` more blocks for each of the rows, none beyond its limit: rows and places in their tables, flat."""
        held = self.num_blocks_R[rows]
        useful = -(-self.limit_R[rows] // self.block_size) - held
        return _spread(rows, held, np.minimum(useful, most))

    def write_leases(self, rows: np.ndarray, places: np.ndarray, blocks: np.ndarray) -> None:
        """Append leased blocks to block tables; see `lease_places`."""
        self.block_table_RB[rows, places] = blocks
        np.add.at(self.num_blocks_R, rows, 1)

    def take_back_leases(self) -> np.ndarray:
        """The blocks that decoding rows hold beyond their next token, taken out of their tables.

        The worker's tables go on naming them, which does no harm: a row's length never reaches them without a new grant.
        """
        rows = self.decoding_rows()
        needed = self.num_computed_R[rows] // self.block_size + 1
        ahead = rows[self.num_blocks_R[rows] > needed]
        ends = needed[self.num_blocks_R[rows] > needed]
        blocks = [self.block_table_RB[row, end : self.num_blocks_R[row]] for row, end in zip(ahead, ends, strict=True)]
        taken = np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.int32)
        self.num_blocks_R[ahead] = ends
        return taken

    def decoding_rows(self) -> np.ndarray:
        """Rows whose next token is computed from their last one and may be sampled, in ascending order."""
        ready_R = (self.num_computed_R >= self.prefill_end_R) & (self.num_planned_R < self.limit_R) & (self.generation_R > 0)
        waits_R = self.is_stepwise_R & (self.num_planned_R > self.num_known_R)
        return np.flatnonzero(ready_R & ~waits_R)

    def prefilling_rows(self) -> np.ndarray:
        """Rows with known tokens left to compute, the most urgent first, then the oldest."""
        return self._by_rank(np.flatnonzero((self.num_computed_R < self.prefill_end_R) & (self.generation_R > 0)))

    def running_rows(self) -> np.ndarray:
        """Rows in use, the most urgent first, then the oldest."""
        return self._by_rank(np.flatnonzero(self.generation_R))

    def less_urgent_rows(self, priority: int) -> np.ndarray:
        """Rows in use of a higher priority number, in the order of `running_rows`."""
        return self._by_rank(np.flatnonzero((self.priority_R > priority) & (self.generation_R > 0)))

    def _by_rank(self, rows: np.ndarray) -> np.ndarray:
        return rows[np.lexsort((self.arrival_R[rows], self.priority_R[rows]))] if len(rows) > 1 else rows

    def full_rows(self, rows: np.ndarray) -> np.ndarray:
        """Those of `rows` whose next token has no block yet."""
        return rows[self.num_computed_R[rows] >= self.num_blocks_R[rows] * self.block_size]

    def take_unpublished(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The blocks full of known, computed tokens that the prefix index has not been shown, as rows and places; now they have been."""
        num_full = np.minimum(self.num_known_R[rows], self.num_computed_R[rows]) // self.block_size
        new = np.flatnonzero(num_full > self.num_published_R[rows])
        rows, num_full = rows[new], num_full[new]
        first = self.num_published_R[rows]
        self.num_published_R[rows] = num_full
        return _spread(rows, first, num_full - first)

    def contents(self, rows: np.ndarray, places: np.ndarray) -> list[bytes]:
        """The tokens of full blocks."""
        return self._contents_RB[rows, places].tolist()

    def check(self) -> None:
        """Assert the invariant of every row."""
        used = np.flatnonzero(self.generation_R)
        assert len(used) == self.num_running
        assert (self.num_computed_R[used] <= self.num_planned_R[used]).all()
        assert (self.num_known_R[used] <= self.num_planned_R[used]).all()
        assert (self.num_planned_R[used] <= self.limit_R[used]).all()
        assert (self.num_published_R[used] * self.block_size <= np.minimum(self.num_known_R, self.num_computed_R)[used]).all()
        assert (self.num_computed_R[used] <= self.num_blocks_R[used] * self.block_size).all()
        assert len(np.unique(self.generation_R[used])) == len(used)
        assert (self.num_planned_R - self.num_known_R <= 1)[used[self.is_stepwise_R[used]]].all()


def _spread(rows: np.ndarray, first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows[i] counts[i] times, beside the places from first[i] on."""
    if (counts == 1).all():  # as in nearly every decode step: 12 µs saved
        return rows, first
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(rows, counts), np.repeat(first, counts) + np.arange(counts.sum()) - starts
