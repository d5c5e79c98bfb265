"""A worker around the checksum model whose steps take a given time, as a GPU's do: the core is free meanwhile.

Run as `python -m tests.bench.timed_worker CONFIG_FILE LIFELINE_FD STEP_MS`.
"""

import sys
import time

from torch import Tensor

from protocol.config import EngineConfig
from protocol.lifeline import run_child
from worker import main as worker_main
from worker.batch import StepBatch
from worker.checksum import ChecksumModel


class TimedModel(ChecksumModel):
    """Right tokens, after step_s seconds."""

    def __init__(self, max_model_len: int | None, step_s: float):
        super().__init__(max_model_len)
        self.step_s = step_s

    def logits(self, batch: StepBatch) -> Tensor:
        """As the checksum model's."""
        end = time.perf_counter() + self.step_s
        logits_NV = super().logits(batch)
        time.sleep(max(0.0, end - time.perf_counter()))
        return logits_NV


def build_model(config: EngineConfig) -> TimedModel:
    """In the place of worker.executor.build_model."""
    return TimedModel(config.max_model_len, float(sys.argv[4]) / 1e3)


if __name__ == "__main__":
    worker_main.build_model = build_model
    run_child(worker_main.main)
