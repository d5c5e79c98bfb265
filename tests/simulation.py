"""Scheduler and worker in one process, without sockets: the real planner, deltas, rows and batch around a model of choice."""

from collections import deque

import numpy as np
import torch

from kernels import reference, reference_rows
from protocol.messages import (
    AddRequest,
    StepDelta,
    StepResult,
    decode_result,
    decode_to_worker,
    encode,
    pack,
    unpack,
)
from protocol.sampling import RowSampling
from scheduler.core import Limits, Scheduler
from worker.batch import PersistentBatch
from worker.checksum import ChecksumModel
from worker.rows import RowState
from worker.runner import StepRunner
from worker.staging import HostStaging

GREEDY = RowSampling()


class SimulatedWorker:
    """A worker's loop body; messages pass through the wire format."""

    def __init__(self, limits: Limits, model):
        max_tokens = limits.num_rows + limits.max_step_tokens
        model.allocate(limits.num_blocks, limits.block_size, max_tokens, limits.num_rows)
        max_blocks = -(-model.max_model_len // limits.block_size)
        self.rows = RowState(limits.num_rows, max_blocks, limits.num_blocks, torch.device("cpu"))
        self.batch = PersistentBatch(self.rows, max_tokens, HostStaging())
        self.runner = StepRunner(model, reference, reference_rows, self.rows, limits.block_size, model.vocab_size)
        self.num_tokens_run = 0

    def run(self, payload: bytes) -> bytes:
        """One delta to one result."""
        delta = decode_to_worker(payload)
        assert isinstance(delta, StepDelta)
        step = self.batch.apply(delta)
        sampled_N = self.runner.run(step)
        self.num_tokens_run += len(step.token_ids_T)
        return encode(StepResult(delta.step, pack(sampled_N[: step.num_results].numpy())))


class Simulation:
    """An engine whose results arrive `depth` steps late, as with a pipeline that is always full."""

    def __init__(self, model=None, **limits):
        model = model or ChecksumModel(None)
        defaults = dict(
            num_rows=8, num_blocks=256, block_size=4, max_model_len=model.max_model_len, vocab_size=model.vocab_size,
            max_step_tokens=64, max_pipeline_depth=2, max_queued_requests=10_000,
        )  # fmt: skip
        self.limits = Limits(**{**defaults, **limits})
        self.scheduler = Scheduler(self.limits)
        self.worker = SimulatedWorker(self.limits, model)
        self.results: deque[bytes] = deque()
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.message_sizes: list[int] = []
        self.most_draining = 0

    def add(
        self, handle: int, prompt: list[int], max_tokens: int, end_ids=(), sampling: RowSampling = GREEDY, generated=()
    ):
        """Queue a request; returns the refusal, if it is one."""
        message = AddRequest(handle, pack(prompt), pack(list(generated)), max_tokens, list(end_ids), sampling)
        refused = self.scheduler.add(0, message)
        if refused is None:
            self.outputs[handle] = []
        return refused

    def abort(self, handle: int) -> None:
        self.scheduler.abort(0, handle)

    def step(self) -> bool:
        """Plan until the pipeline is full, then confirm one step; False when there was nothing to do."""
        while self.scheduler.has_room and (plan := self.scheduler.plan()):
            payload = encode(plan.delta)
            self.message_sizes.append(len(payload))
            self.results.append(self.worker.run(payload))
            self.most_draining = max(self.most_draining, len(self.scheduler.draining))
        if not self.results:
            return False
        arrivals = self.scheduler.confirm(decode_result(self.results.popleft()))
        for _, batch in arrivals.batches():
            handles = np.frombuffer(batch.handles, dtype="<i8")
            for handle, token in zip(handles.tolist(), unpack(batch.tokens).tolist(), strict=True):
                assert handle not in self.finished
                self.outputs[handle].append(token)
            for message in batch.finished:
                assert message.handle not in self.finished
                self.finished[message.handle] = message.reason
        return True

    def run(self) -> None:
        """Until idle; every block and row must be free then."""
        while self.step():
            pass
        self.check_idle()

    def check_idle(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        assert not scheduler.requests and not scheduler.waiting and not scheduler.draining and not scheduler.in_flight
        assert scheduler.pool.num_free == self.limits.num_blocks
        assert scheduler.table.num_free_rows == self.limits.num_rows
