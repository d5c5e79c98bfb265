"""Sampled tokens on their way to the scheduler: one copy and one message per step, off the main thread."""

import queue
import threading

import torch
import zmq
from torch import Tensor

from protocol.messages import StepResult, pack
from protocol.transport import Endpoint


class ResultSender:
    """A ring of host buffers, filled by the main thread and emptied by a thread that sends them.

    The scheduler has at most `depth` steps unconfirmed, so a slot is long sent when its turn comes again: asserted, not waited for.
    """

    def __init__(self, endpoint: Endpoint, depth: int, max_results: int):
        self.endpoint = endpoint
        self.ring = [torch.zeros(max_results, dtype=torch.int32) for _ in range(depth + 1)]
        self.is_sent = [True] * len(self.ring)
        self.filled: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="results", daemon=True).start()

    def publish(self, step: int, sampled_N: Tensor, num_results: int) -> None:
        """Have the first num_results tokens of a step sent."""
        slot = step % len(self.ring)
        assert self.is_sent[slot], f"the result of step {step - len(self.ring)} is still unsent at step {step}"
        self.is_sent[slot] = False
        self.ring[slot][:num_results].copy_(sampled_N[:num_results])
        self.filled.put((step, slot, num_results))

    def _send_all(self) -> None:
        while True:
            step, slot, num_results = self.filled.get()
            tokens = pack(self.ring[slot][:num_results].numpy())
            self.is_sent[slot] = True  # before the message, whose receipt lets the scheduler send the slot's next step
            try:
                self.endpoint.send(StepResult(step, tokens))
            except zmq.ZMQError:
                return  # the scheduler is gone; the supervisor ends this process
