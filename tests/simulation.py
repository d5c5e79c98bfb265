"""Scheduler and worker in one process, without sockets: the real planner, deltas, rows and batch around a model of choice."""

import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from protocol.config import EngineConfig
from protocol.messages import AddRequest, StepDelta, StepResult, decode_result, decode_to_worker, encode, pack, unpack
from protocol.sampling import RowSampling
from scheduler.core import Limits, Scheduler
from worker.checksum import ChecksumModel
from worker.executor import Executor, build_executor
from worker.runner import Model

GREEDY = RowSampling()


def make_executor(model: Model, limits: Limits, **overrides: object) -> Executor:
    """What the worker process would build for these limits."""
    config = EngineConfig(
        model="", served_model_name="", run_dir="", client_address="", epoch=0, tune_kernels=False,
        max_num_seqs=limits.num_rows, max_num_batched_tokens=limits.max_step_tokens, block_size=limits.block_size,
        num_kv_blocks=limits.num_blocks, max_pipeline_depth=limits.max_pipeline_depth,
        swap_space=(limits.num_host_blocks + 0.5) * model.kv_bytes_per_token * limits.block_size / 2**30,
    )  # fmt: skip
    return build_executor(msgspec.structs.replace(config, **overrides), model, tokenizer_size=0)


class SimulatedWorker:
    """A worker's loop body; messages pass through the wire format. `run` starts a step, the call of what it returns waits for it."""

    def __init__(self, executor: Executor):
        self.executor = executor

    def run(self, payload: bytes) -> Callable[[], bytes]:
        """One delta to one result."""
        delta = decode_to_worker(payload)
        assert isinstance(delta, StepDelta)
        step = self.executor.batch.apply(delta)
        sampled_N = self.executor.runner.run(step)[: step.num_results].clone()
        scores_XW = step.scores_XW.clone()
        done = torch.cuda.Event() if sampled_N.is_cuda else None
        if done is not None:
            done.record()  # copying no tokens waits for nothing

        def result() -> bytes:
            if done is not None:
                done.synchronize()
            return encode(StepResult(delta.step, pack(sampled_N.cpu().numpy()), scores_XW.cpu().numpy().tobytes()))

        return result


class Simulation:
    """An engine whose results arrive `depth` steps late, as with a pipeline that is always full."""

    def __init__(self, model: Model | None = None, overrides: dict | None = None, **limits):
        model = model or ChecksumModel(None)
        defaults = dict(
            num_rows=8, num_blocks=256, block_size=4, max_model_len=model.max_model_len, vocab_size=model.vocab_size,
            max_step_tokens=64, max_pipeline_depth=2, max_queued_requests=10_000,
        )  # fmt: skip
        self.limits = Limits(**{**defaults, **limits})
        self.scheduler = Scheduler(self.limits)
        self.worker = SimulatedWorker(make_executor(model, self.limits, **(overrides or {})))
        self.results: deque[Callable[[], bytes]] = deque()
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.num_cached: dict[int, int] = {}
        self.scores: dict[int, list[bytes]] = {}  # of each token, where asked for
        self.prompt_scores: dict[int, bytes] = {}
        self.message_sizes: list[int] = []
        self.most_draining = 0

    def add(
        self, handle: int, prompt: list[int], max_tokens: int, end_ids=(), sampling: RowSampling = GREEDY, generated=(), salt: bytes = b"",
        now: float = 0.0, **fields: object,
    ):  # fmt: skip
        """Queue a request; returns the refusal, if it is one."""
        message = AddRequest(handle, pack(prompt), pack(list(generated)), max_tokens, list(end_ids), sampling, salt, **fields)
        refused = self.scheduler.add(0, message, now)
        if refused is None:
            self.outputs.update((handle + index, []) for index in range(1 + len(message.more_seeds)))
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
        arrivals = self.scheduler.confirm(decode_result(self.results.popleft()()))
        for _, batch in arrivals.batches():
            handles = np.frombuffer(batch.handles, dtype="<i8")
            for handle, token in zip(handles.tolist(), unpack(batch.tokens).tolist(), strict=True):
                assert handle not in self.finished
                self.outputs[handle].append(token)
            self.num_cached.update((message.handle, message.num_cached) for message in batch.started)
            for message in batch.scores:
                if message.is_prompt:
                    self.prompt_scores[message.handle] = self.prompt_scores.get(message.handle, b"") + message.data
                else:
                    self.scores.setdefault(message.handle, []).append(message.data)
            for message in batch.finished:
                assert message.handle not in self.finished
                self.finished[message.handle] = message.reason
        return True

    def run(self) -> None:
        """Until idle; every block and row must be free then."""
        while self.step():
            pass
        self.check_idle()

    def churn(self, rng: random.Random, handles: Sequence[int], abort_share: float) -> set[int]:
        """Step while a coin says so, then perhaps abort one of the handles: which. The invariant holds after each."""
        while rng.random() < 0.6:
            self.step()
            self.scheduler.check()
        if rng.random() >= abort_share:
            return set()
        victim = rng.choice(handles)
        self.abort(victim)
        self.scheduler.check()
        return {victim}

    def check_idle(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        assert not scheduler.requests and not scheduler.waiting and not scheduler.draining and not scheduler.in_flight
        assert scheduler.pool.num_free == self.limits.num_blocks
        assert scheduler.table.num_free_rows == self.limits.num_rows
        assert scheduler.swap.num_free == self.limits.num_host_blocks
