"""The scheduler without its sockets: requests in, steps out, tokens confirmed.

A request is waiting (in `waiting`), running (it has a row), or draining: preempted while tokens that it sampled were still in
flight. They are accepted when they arrive, once, and only then does it wait for a row again.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass

import numpy as np

from protocol.messages import (
    NO_TOKEN,
    AddRequest,
    BlockGrants,
    Chunk,
    Finished,
    FinishReason,
    Refused,
    RowJoin,
    Started,
    StepDelta,
    StepResult,
    TokenBatch,
    pack,
    unpack,
)
from scheduler.blocks import BlockPool
from scheduler.delta import DeltaBuilder
from scheduler.prefix import NoPrefixIndex, PrefixIndex
from scheduler.policy import StepPlan, blocks_for, can_admit, lease_size, plan_step
from scheduler.table import MAX_END_IDS, Request, RequestTable


@dataclass(frozen=True)
class Limits:
    """What the workers' capacities and the configuration allow."""

    num_rows: int
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_step_tokens: int
    max_pipeline_depth: int
    max_queued_requests: int
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class Plan:
    """A step sent and not yet confirmed: the rows that it samples for, in the order of its result."""

    delta: StepDelta
    rows: np.ndarray
    generations: np.ndarray


@dataclass
class Arrivals:
    """What one result brought: tokens, and requests that ended with them, each with its frontend."""

    frontends: np.ndarray
    handles: np.ndarray
    tokens: np.ndarray
    finished: list[tuple[int, Finished]]
    started: list[tuple[int, Started]]

    def batches(self) -> list[tuple[int, TokenBatch]]:
        """One message for each frontend concerned."""
        names = sorted({*self.frontends.tolist(), *(frontend for frontend, _ in self.finished + self.started)})
        return [(frontend, self._batch(frontend)) for frontend in names]

    def _batch(self, frontend: int) -> TokenBatch:
        mine = self.frontends == frontend
        finished, started = ([m for owner, m in messages if owner == frontend] for messages in (self.finished, self.started))
        return TokenBatch(self.handles[mine].astype("<i8").tobytes(), pack(self.tokens[mine]), finished, started)


class Scheduler:
    """Requests, rows and blocks. Invariant: a block has as many holders as tables name it; each request is in one of three places."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        make_index = PrefixIndex if limits.enable_prefix_caching else NoPrefixIndex
        self.prefixes = make_index(self.pool, limits.block_size)
        self.table = RequestTable(limits.num_rows, limits.max_model_len, limits.block_size)
        self.deltas = DeltaBuilder(limits.num_rows)
        self.in_flight: deque[Plan] = deque()
        self.depth = limits.max_pipeline_depth  # steps to keep in flight at present; at most that limit
        self.requests: dict[tuple[int, int], Request] = {}  # (frontend, handle) of every request not finished
        self.waiting: list[Request] = []  # oldest first
        self.draining: dict[int, Request] = {}  # by the generation of the row that it lost
        self.num_arrived = self.num_preemptions = self.num_generated_tokens = 0
        self.started: list[tuple[int, Started]] = []  # to be told with the next tokens
        self.num_prompt_tokens = self.num_cached_tokens = 0  # of admissions, and found in the prefix index

    # ---- requests come and go -------------------------------------------------------------------------------------

    def add(self, frontend: int, message: AddRequest) -> Refused | None:
        """Queue a request, or say why not."""
        if len(self.waiting) >= self.limits.max_queued_requests:
            return Refused(message.handle, 503, f"the queue is full: {len(self.waiting)} requests wait, try again later")
        tokens = np.concatenate([unpack(message.prompt), unpack(message.generated)])
        if fault := self._fault(frontend, message, tokens):
            return Refused(message.handle, 400, fault)
        prompt_len = len(message.prompt) // 4
        request = Request(
            frontend=frontend,
            handle=message.handle,
            arrival=self.num_arrived,
            prompt_len=prompt_len,
            tokens=tokens,
            limit=min(prompt_len + message.max_tokens, self.limits.max_model_len),
            end_ids=np.asarray(message.end_ids, dtype=np.int32),
            sampling=message.sampling,
            salt=message.salt,
        )
        self.num_arrived += 1
        self.requests[frontend, message.handle] = request
        self.waiting.append(request)
        return None

    def abort(self, frontend: int, handle: int) -> None:
        """Forget a request wherever it is; its tokens in flight are dropped. Harmless when it is unknown."""
        request = self.requests.pop((frontend, handle), None)
        if request is None:
            return
        if request.row is not None:
            self._release(request.row)
        elif request.num_in_flight:
            self.draining = {generation: other for generation, other in self.draining.items() if other is not request}
        else:
            self.waiting.remove(request)

    def abort_frontend(self, frontend: int) -> None:
        """Forget all requests of a frontend that is gone."""
        for owner, handle in [key for key in self.requests if key[0] == frontend]:
            self.abort(owner, handle)

    def _fault(self, frontend: int, message: AddRequest, tokens: np.ndarray) -> str | None:
        """What is wrong with a request. The doors have checked all this; a scheduler that trusts them dies with them."""
        limits = self.limits
        if (frontend, message.handle) in self.requests:
            return f"handle {message.handle} is in use"
        if len(message.prompt) == 0:
            return "the prompt is empty"
        if len(tokens) >= limits.max_model_len:
            return f"the prompt has {len(tokens)} tokens; the context length {limits.max_model_len} leaves no room for a new one"
        if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
            return f"token ids must be between 0 and {limits.vocab_size - 1}"
        if message.max_tokens <= len(message.generated) // 4:
            return f"max_tokens must exceed the {len(message.generated) // 4} tokens generated already, got {message.max_tokens}"
        if len(message.end_ids) > MAX_END_IDS:
            return f"at most {MAX_END_IDS} end ids are supported, got {len(message.end_ids)}"
        return None

    # ---- a step is planned ----------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether another step may be sent before one is confirmed."""
        return len(self.in_flight) < self.depth

    def plan(self) -> Plan | None:
        """The next step, already accounted for; None when nothing can run."""
        grants = self._grow()
        joins = self._admit()
        table = self.table
        prompt_rows = table.prefilling_rows()
        left = table.prefill_end_R[prompt_rows] - table.num_computed_R[prompt_rows]
        step = plan_step(table.decoding_rows(), prompt_rows, left, self.limits.max_step_tokens)
        if step.is_empty:
            assert not joins and grants is None
            return None
        chunks = self._chunks(step)
        rows = np.concatenate([step.decode_rows, step.chunk_rows[[chunk.samples for chunk in chunks]]])
        self._advance(step, rows)
        plan = Plan(self.deltas.build(step.decode_rows, joins, grants, chunks), rows, table.generation_R[rows])
        self.in_flight.append(plan)
        return plan

    def _grow(self) -> BlockGrants | None:
        """Lease blocks to the decoding rows that have none for their next token, preempting the newest requests where they run out."""
        full = self.table.full_rows(self.table.decoding_rows())
        if len(full) > self.pool.num_free:
            self._take_back_leases()
        while len(full) > self.pool.num_free:
            self._preempt(int(self.table.running_rows()[-1]))
            full = self.table.full_rows(self.table.decoding_rows())
        if len(full) == 0:
            return None
        rows, places = self.table.lease_places(full, lease_size(self.pool.num_free, self.table.num_running))
        blocks = self._take(len(rows))
        self.table.write_leases(rows, places, blocks)
        return BlockGrants(pack(rows), pack(places), pack(blocks))

    def _take_back_leases(self) -> None:
        self.pool.give(self.table.take_back_leases())

    def _admit(self) -> list[RowJoin]:
        """Move requests from the queue into rows, oldest first, while rows and blocks last."""
        joins = []
        while self.waiting and self.table.num_free_rows:
            join = self._admit_one(self.waiting[0])
            if join is None:
                self._take_back_leases()
                join = self._admit_one(self.waiting[0])
            if join is None:
                break
            del self.waiting[0]
            joins.append(join)
        return joins

    def _admit_one(self, request: Request) -> RowJoin | None:
        """Give a request a row and blocks, those of its prefix shared where they are indexed; None when blocks are short."""
        free, num_running = self.pool.num_free, self.table.num_running
        if num_running and free - num_running <= request.refused_at:
            return None  # nothing has changed for the better: not worth hashing its prompt again
        shared, key = self.prefixes.find(request.tokens, request.salt)
        num_new = blocks_for(len(request.tokens) + 1, self.limits.block_size) - len(shared)
        if not can_admit(num_new + self.pool.count_idle(shared), free, num_running):
            request.refused_at = free - num_running
            return None
        self.pool.share(shared)
        blocks = np.concatenate([np.array(shared, dtype=np.int32), self._take(num_new)])
        row = self.table.admit(request, blocks, len(shared), key)
        num_computed = int(self.table.num_computed_R[row])
        self.num_prompt_tokens += len(request.tokens)
        self.num_cached_tokens += num_computed
        if not request.was_admitted:
            request.was_admitted = True
            self.started.append((request.frontend, Started(request.handle, num_computed)))
        generation = int(self.table.generation_R[row])
        return RowJoin(row, generation, request.prompt_len, num_computed, pack(blocks), request.sampling)

    def _take(self, count: int) -> np.ndarray:
        blocks = self.pool.take(count)
        self.prefixes.forget_evicted()
        return blocks

    def _chunks(self, step: StepPlan) -> list[Chunk]:
        table, chunks = self.table, []
        for row, size in zip(step.chunk_rows.tolist(), step.chunk_sizes.tolist(), strict=True):
            start = int(table.num_computed_R[row])
            tokens = pack(table.tokens_RL[row, start : start + size])
            chunks.append(Chunk(row, tokens, samples=start + size == int(table.prefill_end_R[row])))
        return chunks

    def _advance(self, step: StepPlan, sampling_rows: np.ndarray) -> None:
        self.table.num_computed_R[step.decode_rows] += 1
        self.table.num_computed_R[step.chunk_rows] += step.chunk_sizes
        self.table.num_planned_R[sampling_rows] += 1
        self._publish(step.chunk_rows)  # whoever is admitted later runs later

    def _publish(self, rows: np.ndarray) -> None:
        """Index the blocks that have become full of known and computed tokens."""
        table = self.table
        for row in table.publishable_rows(rows).tolist():
            first = int(table.num_published_R[row])
            end = int(min(table.num_known_R[row], table.num_computed_R[row])) // self.limits.block_size
            tokens, blocks = table.tokens_RL[row], table.block_table_RB[row]
            table.prefix_key[row] = self.prefixes.publish(tokens, blocks, first, end, table.prefix_key[row])
            table.num_published_R[row] = end

    def _preempt(self, row: int) -> None:
        """Take row and blocks away; the request is computed anew once all that it sampled has arrived."""
        assert self.table.num_running > 1, "the pool holds less than one full context"
        generation = int(self.table.generation_R[row])
        num_in_flight = int(self.table.num_planned_R[row] - self.table.num_known_R[row])
        request = self._release(row)
        request.num_in_flight = num_in_flight
        self.num_preemptions += 1
        if num_in_flight:
            self.draining[generation] = request
        else:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda other: other.arrival)

    def _release(self, row: int) -> Request:
        request, blocks = self.table.release(row)
        self.pool.give(blocks)
        return request

    # ---- a step is confirmed --------------------------------------------------------------------------------------

    def confirm(self, result: StepResult) -> Arrivals:
        """Turn the placeholders of the oldest step in flight into tokens; end what they end."""
        plan = self.in_flight.popleft()
        assert result.step == plan.delta.step, f"result of step {result.step}, expected {plan.delta.step}"
        tokens = unpack(result.tokens)
        assert len(tokens) == len(plan.rows), f"step {result.step}: {len(tokens)} tokens for {len(plan.rows)} rows"
        live = self.table.generation_R[plan.rows] == plan.generations
        arrivals = self._confirm_rows(plan.rows[live], tokens[live])
        if self.draining and not live.all():
            self._confirm_draining(plan.generations[~live], tokens[~live], arrivals)
        self.num_generated_tokens += len(arrivals.tokens)
        return arrivals

    def _confirm_rows(self, rows: np.ndarray, tokens: np.ndarray) -> Arrivals:
        table = self.table
        known = table.num_known_R[rows]
        table.tokens_RL[rows, known] = tokens
        table.num_known_R[rows] = known + 1
        ended = (table.end_ids_RE[rows, : table.num_end_ids] == tokens[:, None]).any(axis=1)
        full = known + 1 >= table.limit_R[rows]
        broken = tokens == NO_TOKEN
        ended &= ~broken  # NO_TOKEN equals NO_ID, the filler of an end-id column
        kept = ~broken
        self._publish(rows[kept])
        arrivals = Arrivals(table.frontend_R[rows][kept], table.handle_R[rows][kept], tokens[kept], [], self.started)
        self.started = []
        for i in np.flatnonzero(ended | full | broken).tolist():
            request = self._release(int(rows[i]))
            self._finish(request, "error" if broken[i] else "stop" if ended[i] else "length", arrivals)
        return arrivals

    def _confirm_draining(self, generations: np.ndarray, tokens: np.ndarray, arrivals: Arrivals) -> None:
        """Late tokens of preempted requests. A token of a generation that nobody waits for came after a stop: dropped."""
        for generation, token in zip(generations.tolist(), tokens.tolist(), strict=True):
            request = self.draining.get(generation)
            if request is None:
                continue
            request.num_in_flight -= 1
            reason = self._append(request, token)
            if token != NO_TOKEN:
                arrivals.frontends = np.append(arrivals.frontends, request.frontend)
                arrivals.handles = np.append(arrivals.handles, request.handle)
                arrivals.tokens = np.append(arrivals.tokens, token)
            if reason is not None:
                del self.draining[generation]
                self._finish(request, reason, arrivals)
            elif request.num_in_flight == 0:
                del self.draining[generation]
                self._requeue(request)

    def _append(self, request: Request, token: int) -> FinishReason | None:
        """Add a token to a request without a row; returns why it ends with it, if it does."""
        if token == NO_TOKEN:
            return "error"
        request.tokens = np.append(request.tokens, np.int32(token))
        if token in request.end_ids:
            return "stop"
        return "length" if len(request.tokens) >= request.limit else None

    def _finish(self, request: Request, reason: FinishReason, arrivals: Arrivals) -> None:
        del self.requests[request.frontend, request.handle]
        arrivals.finished.append((request.frontend, Finished(request.handle, reason)))

    def check(self) -> None:
        """Assert the invariant."""
        self.pool.check()
        self.table.check()
        self.prefixes.check()
        held = np.concatenate([self.table.blocks(row) for row in range(self.limits.num_rows)])
        assert (np.bincount(held, minlength=self.pool.num_blocks) == self.pool.num_holders).all()
        places = [*self.waiting, *self.draining.values(), *filter(None, self.table.requests)]
        assert sorted(map(id, places)) == sorted(map(id, self.requests.values()))
        assert all(request.num_in_flight > 0 for request in self.draining.values())
        assert [r.arrival for r in self.waiting] == sorted(r.arrival for r in self.waiting)
