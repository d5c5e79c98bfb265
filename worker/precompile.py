"""Compiles the kernels that the tuner will time, in processes of their own: minutes of one core become seconds of many.

Triton keeps binaries on disk, so the worker finds them there. Run as `python -m worker.precompile CONFIG_FILE TOKENIZER_SIZE SHARE OF`.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kernels.candidates import candidates, head_candidates
from kernels.head import compile_head
from protocol.config import EngineConfig, load_config
from worker.batch import bucket_for
from worker.decode import head_of, layer_projections
from worker.loading import open_config, resolve_device, resolve_dtype
from worker.model_config import ModelConfig
from worker.tuning import PRODUCTS, tuned_size

MOST_PROCESSES = 16


def compile_ahead(config_file: Path, tokenizer_size: int) -> None:
    """Compile every candidate of every size, and wait for it. A process that fails leaves its share to the tuner."""
    total = min(os.cpu_count() or 1, MOST_PROCESSES)
    command = [sys.executable, "-m", "worker.precompile", str(config_file), str(tokenizer_size)]
    for process in [subprocess.Popen([*command, str(share), str(total)]) for share in range(total)]:
        process.wait()


def step_sizes(config: EngineConfig) -> list[int]:
    """The buckets of decode steps."""
    return sorted({bucket_for(count, config.max_num_seqs) for count in range(1, config.max_num_seqs + 1)})


def compilations(c: ModelConfig, dtype: torch.dtype, buckets: list[int], sampled_vocab: int) -> Iterator[Callable[[], None]]:
    """One call for each kernel to compile."""
    for size in sorted({tuned_size(bucket) for bucket in buckets}):
        projections = layer_projections(c, dtype, size)
        for projection in (getattr(projections, name) for name in PRODUCTS):
            for config in candidates(projection):
                yield lambda config=config, projection=projection: config.compile(projection, True)
        for has_chance in (False, True):
            head = head_of(c, dtype, size, sampled_vocab, has_chance)
            for config in head_candidates(head):
                yield lambda config=config, head=head: compile_head(config, head, True)


def main(config_file: str, tokenizer_size: int, share: int, total: int) -> None:
    """Compile one share."""
    config = load_config(config_file)
    model = open_config(Path(config.model))
    dtype = resolve_dtype(config.dtype, model.dtype, resolve_device(config.device))
    sampled_vocab = min(tokenizer_size or model.vocab_size, model.vocab_size)
    for compile_one in list(compilations(model, dtype, step_sizes(config), sampled_vocab))[share::total]:
        compile_one()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
