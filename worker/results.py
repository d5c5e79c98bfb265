"""Sampled tokens on their way to the scheduler: one copy and one message per step, off the main thread."""

import queue
import threading
from contextlib import suppress

import torch
import zmq
from torch import Tensor

from protocol.logprobs import NUM_WORDS
from protocol.messages import StepResult, pack
from protocol.trace import NoTrace, Span, Trace
from protocol.transport import Endpoint
from worker.device_trace import StepTimer


class ResultSender:
    """A ring of host buffers, filled by copies that the main thread starts and emptied by a thread that waits for them and sends.

    The scheduler has at most `depth` steps unconfirmed, so a slot is long sent when its turn comes again: asserted, not waited for.
    """

    def __init__(
        self, endpoint: Endpoint, depth: int, max_results: int, max_scores: int, on_gpu: bool, trace: Trace | NoTrace, timer: StepTimer
    ):
        self.endpoint, self.trace, self.timer = endpoint, trace, timer
        self.ring = [torch.zeros(max_results, dtype=torch.int32, pin_memory=on_gpu) for _ in range(depth + 1)]
        self.scores_ring = [torch.zeros(max_scores, NUM_WORDS, dtype=torch.int32, pin_memory=on_gpu) for _ in range(depth + 1)]
        # Waiting for an event spins without the interpreter's lock: 13 µs to notice, where a blocking event takes 55 (H200).
        self.copied = [torch.cuda.Event() if on_gpu else None for _ in self.ring]
        self.is_sent = [True] * len(self.ring)
        self.filled: queue.SimpleQueue[tuple[int, int, int, int]] = queue.SimpleQueue()
        self.on_gpu = on_gpu
        if on_gpu:
            threading.Thread(target=self._send_all, name="results", daemon=True).start()

    def publish(self, step: int, sampled_N: Tensor, num_results: int, scores_XW: Tensor) -> None:
        """Have the first num_results tokens of a step sent, and all its scores."""
        slot = step % len(self.ring)
        assert self.is_sent[slot], f"the result of step {step - len(self.ring)} is still unsent at step {step}"
        self.is_sent[slot] = False
        self.ring[slot][:num_results].copy_(sampled_N[:num_results], non_blocking=True)
        if len(scores_XW):
            self.scores_ring[slot][: len(scores_XW)].copy_(scores_XW, non_blocking=True)
        if (copied := self.copied[slot]) is not None:
            copied.record()
        if self.on_gpu:
            self.filled.put((step, slot, num_results, len(scores_XW)))
        else:
            self._send(step, slot, num_results, len(scores_XW))  # there is nothing to wait for, and waking a thread takes 0.1 ms

    def _send_all(self) -> None:
        while True:
            step, slot, num_results, num_scores = self.filled.get()
            with self.trace.span(Span.COPY, step):
                self.copied[slot].synchronize()
            self._send(step, slot, num_results, num_scores)

    def _send(self, step: int, slot: int, num_results: int, num_scores: int) -> None:
        tokens = pack(self.ring[slot][:num_results].numpy())
        scores = self.scores_ring[slot][:num_scores].numpy().tobytes()
        self.is_sent[slot] = True  # before the message, whose receipt lets the scheduler send the slot's next step
        with suppress(zmq.ZMQError), self.trace.span(Span.RETURN, step):  # a scheduler that is gone: the supervisor ends this process
            self.endpoint.send(StepResult(step, tokens, scores))
        self.timer.settle()
