"""The scheduler without its sockets: requests in, steps out, tokens confirmed.

A request is waiting (in `waiting`), running (it has a row), or draining: preempted while tokens that it sampled were still in
flight. They are accepted when they arrive, once, and only then does it wait for a row again.

Everything goes by rank: priority, then arrival. Blocks for growth are taken from the last in rank, a row for a waiting request only from
rows of a less urgent class, and nobody passes the head of the queue. So the first in rank of all is never preempted, and when it waits,
those who run before it only get fewer until it fits, the pool being at least one full context: it ends, and another is the first.
"""

from collections import deque
from collections.abc import Iterator
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
    Scores,
    Started,
    StepDelta,
    StepResult,
    pack,
    unpack,
)
from scheduler.arrivals import Arrivals
from scheduler.blocks import BlockPool
from scheduler.controls import controls_for_row
from scheduler.delta import DeltaBuilder
from scheduler.draining import Draining
from scheduler.intake import Limits, Refusals, choices_of, fault_of, queue_fault
from scheduler.policy import StepPlan, blocks_for, can_admit, lease_size, plan_step
from scheduler.prefix import NO_BLOCK, NoPrefixIndex, PrefixIndex
from scheduler.scoring import PlannedScores, PromptPart, take_targets
from scheduler.swap import SwapSpace
from scheduler.table import Request, RequestTable
from scheduler.waiting import WaitingQueue


@dataclass(frozen=True)
class Plan:
    """A step sent and not yet confirmed: the rows that it samples for, in the order of its result."""

    delta: StepDelta
    rows: np.ndarray
    generations: np.ndarray
    scores: PlannedScores

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.delta.chunks) // 4


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
        self.waiting = WaitingQueue()
        self.draining = Draining()
        self.swap = SwapSpace(limits)
        self.num_arrived = self.num_preemptions = self.num_generated_tokens = 0
        self.refusals = Refusals()
        self.started: list[tuple[int, Started]] = []  # to be told with the next tokens
        self.num_prompt_tokens = self.num_cached_tokens = 0  # of admissions, and found in the prefix index
        self.now = 0.0  # by the clock of `add`, as the caller last set it

    # ---- requests come and go -------------------------------------------------------------------------------------

    def add(self, frontend: int, message: AddRequest, now: float = 0.0) -> Refused | None:
        """Queue a request's choices, or say why not. `now` is a monotonic clock's, in seconds."""
        tokens = np.concatenate([unpack(message.prompt), unpack(message.generated)])
        if full := queue_fault(self.waiting, 1 + len(message.more_seeds), len(tokens), self.limits, self.refusals):
            return Refused(message.handle, 503, f"the queue is full: {full}, try again later")
        if fault := self._handle_fault(frontend, message) or fault_of(message, tokens, self.limits):
            self.refusals.invalid += 1
            return Refused(message.handle, 400, fault)
        choices = choices_of(frontend, message, tokens, self.limits, self.num_arrived, now)
        self.num_arrived += len(choices)
        for choice in choices:
            self.requests[frontend, choice.handle] = choice
        self.waiting.add_new(choices)
        return None

    def _handle_fault(self, frontend: int, message: AddRequest) -> str | None:
        handles = range(message.handle, message.handle + 1 + len(message.more_seeds))
        used = [handle for handle in handles if (frontend, handle) in self.requests]
        return f"handle {used[0]} is in use" if used else None

    def expire(self, now: float) -> list[tuple[int, Refused]]:
        """Refuse the requests that have waited for longer than the queue timeout without ever having had a row."""
        refused = []
        while (deadline := self.deadline) is not None and deadline <= now:
            request = next(iter(self.waiting.unstarted))
            self.abort(request.frontend, request.handle)
            self.refusals.queue_timeout += 1
            text = f"the request waited {now - request.queued_at:.1f} s; --queue-timeout is {self.limits.queue_timeout_s:g} s"
            refused.append((request.frontend, Refused(request.handle, 503, text)))
        return refused

    @property
    def deadline(self) -> float | None:
        """When `expire` has something to do next, by the clock of `add`; None: never, as things are."""
        if self.limits.queue_timeout_s is None or not self.waiting.unstarted:
            return None
        return next(iter(self.waiting.unstarted)).queued_at + self.limits.queue_timeout_s

    def abort(self, frontend: int, handle: int) -> None:
        """Forget a request wherever it is; its tokens in flight are dropped. Harmless when it is unknown."""
        request = self.requests.pop((frontend, handle), None)
        if request is None:
            return
        if request.row is not None:
            self._release(np.array([request.row]))
        elif request.num_in_flight:
            self.draining.remove(request)
        else:
            self.waiting.remove(request)
        self.swap.drop(request)
        self.waiting.leader_ended(request)

    def abort_frontend(self, frontend: int) -> None:
        """Forget all requests of a frontend that is gone."""
        for owner, handle in [key for key in self.requests if key[0] == frontend]:
            self.abort(owner, handle)

    # ---- a step is planned ----------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether another step may be sent before one is confirmed."""
        return len(self.in_flight) < self.depth

    def plan(self) -> Plan | None:
        """The next step, already accounted for; None when nothing can run."""
        joins = self._admit_urgent()
        grants = self._grow()
        joins += self._admit()
        table = self.table
        prompt_rows = table.prefilling_rows()
        left = table.prefill_end_R[prompt_rows] - table.num_computed_R[prompt_rows]
        step = plan_step(table.decoding_rows(), prompt_rows, left, self.limits.max_step_tokens)
        if step.is_empty:
            assert not joins and grants is None  # copies of rows just preempted travel with the next step: nobody writes before it
            return None
        chunks, parts = self._chunks(step)
        rows = np.concatenate([step.decode_rows, step.chunk_rows[[chunk.samples for chunk in chunks]]])
        self._advance(step, rows)
        delta = self.deltas.build(step.decode_rows, joins, grants, chunks, self.swap.take_planned())
        scores = PlannedScores(np.flatnonzero(table.is_scored_R[rows]).tolist(), parts)
        plan = Plan(delta, rows, table.generation_R[rows], scores)
        self.in_flight.append(plan)
        return plan

    def _grow(self) -> BlockGrants | None:
        """Lease blocks to the decoding rows that have none for their next token, preempting the last in rank where they run out."""
        full = self.table.full_rows(self.table.decoding_rows())
        if len(full) > self.pool.num_free:
            self._take_back_leases()
        while len(full) > self.pool.num_free:
            assert self.table.num_running > 1, "the pool holds less than one full context"
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

    def _admit_urgent(self) -> list[RowJoin]:
        """Admit waiting requests in the place of running ones of a less urgent class, the last in rank first.

        Before `_grow`, whose grants must not name rows that are taken away; the reserve of `can_admit` covers what it will take.
        """
        joins = []
        while self.waiting.head is not None and (join := self._admit_over(self.waiting.head)):
            self.waiting.pop()
            joins.append(join)
        return joins

    def _admit_over(self, request: Request) -> RowJoin | None:
        """None also when all the less urgent rows together would not make enough room: then none of them is preempted."""
        victims = self.table.less_urgent_rows(request.priority)
        if len(victims) == 0:
            return None
        self._take_back_leases()
        freed = self.pool.count_freed(np.concatenate([self.table.blocks(row) for row in victims]))
        needed = blocks_for(len(request.tokens) + 1, self.limits.block_size)
        if not can_admit(needed, self.pool.num_free + freed, self.table.num_running - len(victims)):
            return None
        for victim in reversed(victims.tolist()):
            if join := self._admit_one(request):
                return join
            self._preempt(victim)
        return self._admit_one(request)

    def _admit(self) -> list[RowJoin]:
        """Move requests from the queue into rows, in order of rank, while rows and blocks last."""
        joins = []
        while (request := self.waiting.head) is not None and self.table.num_free_rows:
            join = self._admit_one(request)
            if join is None:
                self._take_back_leases()
                join = self._admit_one(request)
            if join is None:
                break
            self.waiting.pop()
            joins.append(join)
        return joins

    def _admit_one(self, request: Request) -> RowJoin | None:
        """Give a request a row and blocks, those of its prefix shared where they are indexed; None when blocks are short."""
        free, num_running = self.pool.num_free, self.table.num_running
        if self.table.num_free_rows == 0:
            return None
        if num_running and free - num_running <= request.refused_at:
            return None  # nothing has changed for the better: not worth hashing its prompt again
        sought = request.tokens[:1] if request.needs_whole_prompt else request.tokens  # nothing is found before the last token
        shared, key = self.prefixes.find(sought, request.salt)
        num_new = blocks_for(len(request.tokens) + 1, self.limits.block_size) - len(shared)
        if not can_admit(num_new + self.pool.count_idle(shared), free, num_running):
            request.refused_at = free - num_running
            return None
        self.pool.share(shared)
        blocks = np.concatenate([np.array(shared, dtype=np.int32), self._take(num_new)])
        num_cached, num_computed = len(shared) * self.limits.block_size, self.swap.restore(request, blocks, len(shared))
        row = self.table.admit(request, blocks, len(shared), key, num_computed)
        self.num_prompt_tokens += len(request.tokens)
        self.num_cached_tokens += num_cached
        if not request.was_admitted:
            request.was_admitted = True
            self.started.append((request.frontend, Started(request.handle, num_cached, self.now - request.queued_at)))
        generation, controls = int(self.table.generation_R[row]), controls_for_row(request.controls, request.tokens)
        return RowJoin(row, generation, request.prompt_len, num_computed, pack(blocks), request.sampling, controls, request.is_scored)

    def _take(self, count: int) -> np.ndarray:
        blocks = self.pool.take(count)
        self.prefixes.forget_evicted()
        return blocks

    def _chunks(self, step: StepPlan) -> tuple[list[Chunk], list[PromptPart]]:
        table, chunks, parts = self.table, [], []
        for row, size in zip(step.chunk_rows.tolist(), step.chunk_sizes.tolist(), strict=True):
            start = int(table.num_computed_R[row])
            tokens = pack(table.tokens_RL[row, start : start + size])
            targets, part = take_targets(table.requests[row], start, size)
            chunks.append(Chunk(row, tokens, start + size == int(table.prefill_end_R[row]), targets))
            parts += [] if part is None else [part]
        return chunks, parts

    def _advance(self, step: StepPlan, sampling_rows: np.ndarray) -> None:
        self.table.num_computed_R[step.decode_rows] += 1
        self.table.num_computed_R[step.chunk_rows] += step.chunk_sizes
        self.table.num_planned_R[sampling_rows] += 1
        if len(step.chunk_rows):
            self._publish(step.chunk_rows)  # whoever is admitted later runs later
            self._release_choices()

    def _release_choices(self) -> None:
        """Let the choices start whose prompt's full blocks can be found."""
        for leader in self.waiting.leaders:
            if leader.row is not None and self.table.num_published_R[leader.row] >= (leader.prompt_len - 1) // self.limits.block_size:
                self.waiting.release(leader)

    def _publish(self, rows: np.ndarray) -> None:
        """Index the blocks that have become full of known and computed tokens.

        Called for prompts as they are computed, and for what a request has generated when it loses its row: a conversation goes on
        after the answer. Doing it in every step took 0.14 of 0.34 ms with 1,024 rows.
        """
        if len(rows) == 0:
            return  # nobody loses a row: most steps
        rows, places = self.table.take_unpublished(rows)
        if len(rows) == 0:
            return  # no block has become full
        blocks_RB, contents = self.table.block_table_RB, self.table.contents(rows, places)
        blocks, parents = blocks_RB[rows, places], blocks_RB[rows, places - 1]
        parents[places == 0] = NO_BLOCK
        self.prefixes.publish(rows.tolist(), contents, blocks.tolist(), parents.tolist(), self.table.prefix_key)

    def _preempt(self, row: int) -> None:
        """Take row and blocks away; the request waits again once all that it sampled has arrived, for its KV to be copied back or
        computed anew."""
        table = self.table
        generation, num_computed, blocks = int(table.generation_R[row]), int(table.num_computed_R[row]), table.blocks(row).copy()
        num_in_flight = int(table.num_planned_R[row] - table.num_known_R[row])
        (request,) = self._release(np.array([row]))
        self.swap.save(request, blocks, num_computed)
        request.num_in_flight = num_in_flight
        self.num_preemptions += 1
        request.num_preemptions += 1
        if num_in_flight:
            self.draining.add(generation, request)
        else:
            self.waiting.add(request)

    def _release(self, rows: np.ndarray) -> list[Request]:
        """Take rows and their blocks away, once what they have generated is indexed; returns their requests."""
        self._publish(rows)
        requests = []
        for row in rows.tolist():
            request, blocks = self.table.release(row)
            self.pool.give(blocks)
            requests.append(request)
        return requests

    # ---- a step is confirmed --------------------------------------------------------------------------------------

    def confirm(self, result: StepResult) -> Arrivals:
        """Turn the placeholders of the oldest step in flight into tokens; end what they end."""
        plan = self.in_flight.popleft()
        assert result.step == plan.delta.step, f"result of step {result.step}, expected {plan.delta.step}"
        tokens = unpack(result.tokens)
        assert len(tokens) == len(plan.rows), f"step {result.step}: {len(tokens)} tokens for {len(plan.rows)} rows"
        scores = list(self._scores(plan, tokens, result.scores)) if result.scores else []
        live = self.table.generation_R[plan.rows] == plan.generations
        if live.all():
            arrivals = self._confirm_rows(plan.rows, tokens)
        else:
            arrivals = self._confirm_rows(plan.rows[live], tokens[live])
            self._confirm_draining(plan.generations[~live], tokens[~live], arrivals)
        self.num_generated_tokens += len(arrivals.tokens)
        arrivals.scores = scores
        return arrivals

    def _scores(self, plan: Plan, tokens: np.ndarray, data: bytes) -> Iterator[tuple[int, Scores]]:
        """The scores of a step, as far as their requests still live and get the tokens."""
        receivers = {}
        for sample in plan.scores.samples:
            row, generation = int(plan.rows[sample]), int(plan.generations[sample])
            is_live = self.table.generation_R[row] == generation and tokens[sample] != NO_TOKEN
            receivers[sample] = self.table.requests[row] if is_live else self.draining.get(generation)
        for frontend, scores in plan.scores.split(data, receivers):
            if (frontend, scores.handle) in self.requests:
                yield frontend, scores

    def _confirm_rows(self, rows: np.ndarray, tokens: np.ndarray) -> Arrivals:
        table = self.table
        known = table.num_known_R[rows]
        table.tokens_RL[rows, known] = tokens
        table.num_known_R[rows] = known + 1
        ended = (table.end_ids_ER[: table.num_end_ids].take(rows, axis=1) == tokens).any(axis=0)
        full = known + 1 >= table.limit_R[rows]
        broken = tokens == NO_TOKEN
        ended &= ~broken  # NO_TOKEN equals NO_ID, the filler of an end-id line
        kept = rows[~broken]
        arrivals = Arrivals(table.frontend_R[kept], table.handle_R[kept], tokens[~broken], [], self.started)
        self.started = []
        ending = np.flatnonzero(ended | full | broken)
        for i, request in zip(ending.tolist(), self._release(rows[ending]), strict=True):
            self._finish(request, "error" if broken[i] else "stop" if ended[i] else "length", arrivals)
        return arrivals

    def _confirm_draining(self, generations: np.ndarray, tokens: np.ndarray, arrivals: Arrivals) -> None:
        """Late tokens of preempted requests."""
        for request, reason in self.draining.accept(generations, tokens, arrivals):
            if reason is None:
                self.waiting.add(request)
            else:
                self.swap.drop(request)
                self._finish(request, reason, arrivals)

    def _finish(self, request: Request, reason: FinishReason, arrivals: Arrivals) -> None:
        del self.requests[request.frontend, request.handle]
        self.waiting.leader_ended(request)
        arrivals.finished.append((request.frontend, Finished(request.handle, reason, request.num_preemptions)))

    def check(self) -> None:
        """Assert the invariant."""
        self.pool.check()
        self.table.check()
        self.prefixes.check()
        held = np.concatenate([self.table.blocks(row) for row in range(self.limits.num_rows)])
        assert (np.bincount(held, minlength=self.pool.num_blocks) == self.pool.num_holders).all()
        places = [*self.waiting, *self.draining, *filter(None, self.table.requests)]
        assert sorted(map(id, places)) == sorted(map(id, self.requests.values()))
        self.draining.check()
        self.swap.check(places)
        self.waiting.check()
        assert all(self.requests[leader.frontend, leader.handle] is leader for leader in self.waiting.leaders)
