"""The scheduler process: sockets around `scheduler.core`.

Run as `python -m scheduler.main CONFIG_FILE LIFELINE_FD`.
"""

import logging
import math
import sys
import time
from bisect import bisect_left
from collections.abc import Callable

import zmq

from protocol.config import EngineConfig
from protocol.lifeline import Lifeline, Ready, remove_leftovers, run_child
from protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    AddRequest,
    FrontendHello,
    FrontendReport,
    GetStats,
    SchedulerReady,
    Snapshot,
    Stats,
    StepResult,
    WorkerBegin,
    WorkerHello,
    WorkerReady,
    decode_from_frontend,
    decode_from_worker,
    decode_result,
)
from protocol.metrics import STEP_TOKENS
from protocol.trace import NoTrace, Span, Trace, open_trace
from protocol.transport import Endpoint, RoutedEndpoint, bind, check_handshake, open_socket
from scheduler.clock import StepClock
from scheduler.core import Limits, Plan, Scheduler

log = logging.getLogger(__name__)

FIRST_STEPS_FACTOR = 5  # of the watchdog's time


class StuckStep(Exception):
    """The workers no longer answer."""


class Channels:
    """The scheduler's sockets, bound, and the lifeline, behind one poller."""

    def __init__(self, config: EngineConfig, lifeline: Lifeline):
        context = zmq.Context()
        workers, results, frontends = (open_socket(context, kind) for kind in (zmq.ROUTER, zmq.PULL, zmq.ROUTER))
        bind(workers, config.address("workers"))
        bind(results, config.address("results"))
        bind(frontends, config.address("frontends"))
        self.workers = RoutedEndpoint(workers, decode_from_worker)
        self.results = Endpoint(results, decode_result)
        self.frontends = RoutedEndpoint(frontends, decode_from_frontend)
        self.lifeline = lifeline
        self.poller = zmq.Poller()
        for readable in (workers, results, frontends, lifeline.fileno()):
            self.poller.register(readable, zmq.POLLIN)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until something arrives, or for so long; False once this process is to stop."""
        ready = dict(self.poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))
        return self.lifeline.fileno() not in ready

    @property
    def num_malformed(self) -> int:
        return self.workers.num_malformed + self.results.num_malformed + self.frontends.num_malformed


class Handshake:
    """Gathers greetings, then the workers' capacities.

    Workers and frontends greet; the workers hear what the tokenizer knows, and answer with what they can hold.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        self.workers: dict[bytes, WorkerHello] = {}
        self.frontends: dict[bytes, FrontendHello] = {}
        self.capacities: dict[bytes, WorkerReady] = {}

    def add(self, identity: bytes, message: WorkerHello | FrontendHello | WorkerReady) -> None:
        """Raises ValueError when a peer does not belong to this engine."""
        match message:
            case WorkerReady():
                self.capacities[identity] = message
                return
            case WorkerHello():
                self.workers[identity] = message
            case FrontendHello():
                self.frontends[identity] = message
        check_handshake(message.version, message.epoch, PROTOCOL_VERSION, self.config.epoch, identity.decode(errors="replace"))

    @property
    def has_greetings(self) -> bool:
        return len(self.workers) == self.config.tensor_parallel_size and len(self.frontends) == self.config.frontend_workers

    @property
    def has_capacities(self) -> bool:
        return len(self.capacities) == len(self.workers)

    def begin(self) -> WorkerBegin:
        """What the workers need to know before they are ready: the smallest tokenizer."""
        sizes = [hello.tokenizer_size for hello in self.frontends.values() if hello.tokenizer_size]
        return WorkerBegin(self.config.epoch, min(sizes, default=0))

    def limits(self) -> Limits:
        """What all workers can hold. A context longer than the KV pool could never finish, so the limit is lowered to it."""
        ready = list(self.capacities.values())
        assert len({(worker.block_size, worker.vocab_size, worker.num_rows) for worker in ready}) == 1, "ranks differ"
        block_size, num_blocks = ready[0].block_size, min(worker.num_blocks for worker in ready)
        wanted = min(worker.max_model_len for worker in ready)
        if wanted > num_blocks * block_size:
            log.warning("max_model_len lowered from %d to %d, the size of the KV pool", wanted, num_blocks * block_size)
        return Limits(
            num_rows=ready[0].num_rows,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=min(wanted, num_blocks * block_size),
            vocab_size=ready[0].vocab_size,
            max_step_tokens=self.config.max_num_batched_tokens,
            max_pipeline_depth=self.config.max_pipeline_depth,
            max_queued_requests=self.config.max_queued_requests,
            max_queued_tokens=self.config.max_num_queued_tokens,
            queue_timeout_s=self.config.queue_timeout,
            enable_prefix_caching=self.config.enable_prefix_caching,
            num_host_blocks=min(worker.num_host_blocks for worker in ready),
            block_copy_s=max(worker.block_copy_s for worker in ready),
            preemption_mode=self.config.preemption_mode,
        )


class SchedulerProcess:
    """The loop of the design: requests in, results in, steps out."""

    def __init__(self, config: EngineConfig, channels: Channels, handshake: Handshake, trace: Trace | NoTrace):
        limits = handshake.limits()
        self.channels = channels
        self.trace = trace
        self.scheduler = Scheduler(limits)
        self.clock = StepClock()
        self.watchdog_s = config.watchdog_timeout
        self.most_depth = limits.max_pipeline_depth
        self.step_tokens = [0] * (len(STEP_TOKENS) + 1)  # steps by the number of their tokens
        self.num_step_tokens = 0
        self.reports: dict[int, FrontendReport] = {}
        self.workers = list(handshake.workers)
        self.frontends = list(handshake.frontends)  # a frontend's index here is its number in the scheduler
        self.welcome = SchedulerReady(PROTOCOL_VERSION, config.epoch, limits.max_model_len, limits.vocab_size)
        for identity in self.frontends:
            channels.frontends.send_to(identity, self.welcome)

    def step(self) -> None:
        """Take in all that has arrived and send every step that can be planned from it."""
        self.scheduler.now = time.monotonic()
        for frontend, refused in self.scheduler.expire(self.scheduler.now):
            self.reply(frontend, refused)
        for identity, message in self.channels.frontends.drain():
            self.handle(identity, message)
        for result in self.channels.results.drain():
            self.confirm(result)
        self.scheduler.depth = self.clock.depth(self.most_depth, has_waiting=bool(self.scheduler.waiting))
        while self.scheduler.has_room and (plan := self.plan()):
            self.send(plan)
        if not self.scheduler.in_flight:
            self.clock.rested()
        self.check_steps()

    def seconds_to_deadline(self) -> float | None:
        """How long nothing is due but what may arrive; None: without end."""
        deadlines = [deadline for deadline in (self.scheduler.deadline, self.step_deadline) if deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    @property
    def step_deadline(self) -> float | None:
        """When the oldest step in flight counts as stuck; the first steps may have kernels to compile."""
        if self.clock.waiting_since is None:
            return None
        return self.clock.waiting_since + self.watchdog_s * (1 if self.clock.step_s else FIRST_STEPS_FACTOR)

    def check_steps(self) -> None:
        """Raise StuckStep when the workers have been silent for too long. The engine ends then: clients hear of it, and hang no more."""
        deadline = self.step_deadline
        if deadline is not None and time.monotonic() > deadline:
            step = self.scheduler.in_flight[0].delta.step
            late = f"step {step} has not come back from the worker for {self.step_age_s():.1f} s"
            raise StuckStep(f"{late}; --watchdog-timeout is {self.watchdog_s:g} s")

    def step_age_s(self) -> float:
        """Time since a result was due; 0 at rest."""
        return 0.0 if self.clock.waiting_since is None else time.monotonic() - self.clock.waiting_since

    def handle(self, identity: bytes, message: AddRequest | AbortRequests | GetStats | FrontendHello) -> None:
        """One message of a frontend."""
        if identity not in self.frontends:
            self.frontends.append(identity)
        frontend = self.frontends.index(identity)
        match message:
            case AddRequest():
                if refused := self.scheduler.add(frontend, message, self.scheduler.now):
                    self.reply(frontend, refused)
            case AbortRequests():
                for handle in message.handles:
                    self.scheduler.abort(frontend, handle)
            case GetStats():
                self.reply(frontend, self.snapshot(frontend))
            case FrontendReport():
                self.reports[frontend] = message
            case FrontendHello():
                self.reply(frontend, self.welcome)

    def confirm(self, result: StepResult) -> None:
        """Hand the tokens of a step to the frontends."""
        num_prompt_tokens = self.scheduler.in_flight[0].num_prompt_tokens
        with self.trace.span(Span.CONFIRM, result.step):
            for frontend, batch in self.scheduler.confirm(result).batches():
                self.reply(frontend, batch)
        self.clock.confirmed(result.step, time.monotonic(), len(self.scheduler.in_flight), num_prompt_tokens)
        self.scheduler.swap.prompt_token_s = self.clock.prompt_token_s

    def send(self, plan: Plan) -> None:
        """Hand a step to the workers."""
        with self.trace.span(Span.SEND, plan.delta.step):
            self.channels.workers.send_to_all(self.workers, plan.delta)
        self.clock.sent(plan.delta.step, time.monotonic(), len(self.scheduler.in_flight))
        num_tokens = len(plan.rows) - sum(chunk.samples for chunk in plan.delta.chunks) + plan.num_prompt_tokens
        self.step_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1
        self.num_step_tokens += num_tokens

    def plan(self) -> Plan | None:
        """The next step, if there is anything to run."""
        with self.trace.span(Span.PLAN) as span:
            plan = self.scheduler.plan()
            span.step = plan.delta.step if plan else None
        return plan

    def reply(self, frontend: int, message: object) -> None:
        """Send to a frontend; one that is gone takes its requests with it."""
        try:
            self.channels.frontends.send_to(self.frontends[frontend], message)
        except zmq.ZMQError as error:
            log.warning("frontend %d is gone (%s), its requests are aborted", frontend, error)
            self.scheduler.abort_frontend(frontend)

    def snapshot(self, frontend: int) -> Snapshot:
        """What a frontend shows of the engine."""
        others = [report for number, report in self.reports.items() if number != frontend]
        return Snapshot(self.stats(), self.step_tokens, self.num_step_tokens, others)

    def stats(self) -> Stats:
        """The scheduler's own part."""
        scheduler = self.scheduler
        return Stats(
            num_running=scheduler.table.num_running,
            num_waiting=len(scheduler.waiting) + len(scheduler.draining),
            free_blocks=scheduler.pool.num_free,
            idle_blocks=scheduler.pool.num_idle,
            total_blocks=scheduler.pool.num_blocks,
            free_rows=scheduler.table.num_free_rows,
            total_rows=scheduler.limits.num_rows,
            num_tracked=len(scheduler.requests),
            num_preemptions=scheduler.num_preemptions,
            num_steps=scheduler.deltas.next_step,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_malformed=self.channels.num_malformed,
            num_waiting_tokens=scheduler.waiting.num_tokens,
            num_refused_invalid=scheduler.refusals.invalid,
            num_refused_queue_requests=scheduler.refusals.queue_requests,
            num_refused_queue_tokens=scheduler.refusals.queue_tokens,
            num_queue_timeouts=scheduler.refusals.queue_timeout,
            num_blocks_out=scheduler.swap.num_out,
            num_blocks_in=scheduler.swap.num_in,
            free_host_blocks=scheduler.swap.num_free,
            total_host_blocks=scheduler.limits.num_host_blocks,
            step_gap_us=int(self.clock.gap_s * 1e6),
            step_age_us=int(self.step_age_s() * 1e6),
        )


def shake_hands(config: EngineConfig, channels: Channels) -> Handshake | None:
    """Bring workers and a frontend to the point where requests can run; None when this process is to stop first."""
    handshake = Handshake(config)

    def gather(is_complete: Callable[[], bool]) -> bool:
        while not is_complete():
            if not channels.wait():
                return False
            for identity, message in [*channels.workers.drain(), *channels.frontends.drain()]:
                handshake.add(identity, message)
        return True

    if not gather(lambda: handshake.has_greetings):
        return None
    channels.workers.send_to_all(list(handshake.workers), handshake.begin())
    return handshake if gather(lambda: handshake.has_capacities) else None


def main(config: EngineConfig, lifeline: Lifeline, index: int) -> None:
    """Serve until the lifeline is cut."""
    channels = Channels(config, lifeline)
    if handshake := shake_hands(config, channels):
        trace = open_trace(config.trace_dir, "scheduler")
        process = SchedulerProcess(config, channels, handshake, trace)
        lifeline.send(Ready(f"max_model_len {process.welcome.max_model_len}, {process.scheduler.pool.num_blocks} KV blocks"))
        try:
            while channels.wait(process.seconds_to_deadline()):
                with trace.span(Span.TURN) as span:
                    process.step()
                    span.step = process.scheduler.deltas.next_step - 1
        except zmq.ZMQError as error:
            sys.exit(f"a worker is gone: {error}")  # the supervisor has the worker's own reason
    remove_leftovers(config)


if __name__ == "__main__":
    run_child(main)
