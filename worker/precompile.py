"""Compiles the kernels of decode steps in processes of their own: minutes of one core become seconds of many.

Triton keeps binaries on disk, so the worker finds them there. Run as `python -m worker.precompile CONFIG_FILE TOKENIZER_SIZE SHARE OF`.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from kernels.candidates import candidates, head_candidates
from kernels.decode_attention import DecodeConfig, decode_attention_launch
from kernels.device import Launch, fix_cache_keys
from kernels.head import compile_head
from kernels.norm import rms_norm_launch
from protocol.config import EngineConfig, load_config
from worker.batch import bucket_for
from worker.decode import head_of, layer_projections
from worker.loading import open_config, resolve_device, resolve_dtype
from worker.model_config import ModelConfig
from worker.tuning import PRODUCTS, Part, choices_file, load_choices, parts_of, tuned_size

MOST_PROCESSES = 16


def compile_ahead(config_file: Path, tokenizer_size: int) -> None:
    """Compile all that a start may need, and wait for it. A process that fails leaves its share to the worker."""
    fix_cache_keys()
    total = min(os.cpu_count() or 1, MOST_PROCESSES)
    command = [sys.executable, "-m", "worker.precompile", str(config_file), str(tokenizer_size)]
    for process in [subprocess.Popen([*command, str(share), str(total)]) for share in range(total)]:
        process.wait()


def step_sizes(config: EngineConfig) -> list[int]:
    """The buckets of decode steps."""
    return sorted({bucket_for(count, config.max_num_seqs) for count in range(1, config.max_num_seqs + 1)})


def representatives(buckets: list[int]) -> list[int]:
    """Buckets that need different binaries: of those that share a tuned size, the largest and one that does not fill its tiles."""
    by_size = {size: list(group) for size, group in itertools.groupby(buckets, key=tuned_size)}
    return sorted({bucket for group in by_size.values() for bucket in (group[0], group[-1])})


def compilations(config: EngineConfig, c: ModelConfig, dtype: torch.dtype, sampled_vocab: int) -> Iterator[Callable[[], None]]:
    """One call for each kernel to compile: the choices that are known; of others every candidate, where they are to be timed."""
    buckets, max_model_len = step_sizes(config), config.max_model_len or c.max_model_len
    known = load_choices(choices_file(Path(config.cache_dir))) if config.tune_kernels and config.cache_dir else {}

    def wanted(part: Part, found: list, is_timed: bool) -> list:
        if part.key in known:
            return found[known[part.key] :][:1]
        return found if config.tune_kernels and is_timed else found[:1]

    for bucket in representatives(buckets):
        size = tuned_size(bucket)
        attention, *products, head = parts_of(c, dtype, size, sampled_vocab, max_model_len)
        if bucket == size:
            for choice in wanted(attention, attention.options, True):
                yield attention_launch(config, c, dtype, choice, max_model_len).compile
        for name, product in zip(PRODUCTS, products):
            projection = getattr(layer_projections(c, dtype, bucket), name)
            for choice in wanted(product, candidates(projection), bucket == size):
                yield partial(choice.compile, projection, True)
        for has_chance in (False, True):
            described = head_of(c, dtype, bucket, sampled_vocab, has_chance)
            for choice in wanted(head, head_candidates(described), bucket == size):
                yield partial(compile_head, choice, described, True)
    strides = (c.hidden_size, c.hidden_size, c.hidden_size, c.hidden_size, 0)
    yield rms_norm_launch(1, 1, c.hidden_size, (dtype, None, dtype, dtype), strides, c.rms_norm_eps, True).compile


def attention_launch(config: EngineConfig, c: ModelConfig, dtype: torch.dtype, attention: DecodeConfig, max_model_len: int) -> Launch:
    """The launch of a decode step's attention, with types in the tensors' places."""
    norm = dtype if c.qk_norm else None
    i32, f32 = torch.int32, torch.float32
    tensors = (dtype, i32, i32, i32, f32, f32, norm, norm, dtype, dtype, f32, f32, i32, dtype)
    table_width = -(-max_model_len // config.block_size)
    return decode_attention_launch(
        tensors, 1, (c.num_heads, c.num_kv_heads, c.head_dim), config.block_size, c.head_dim**-0.5, config.max_num_seqs, table_width,
        c.rope.rope_type != "dynamic", c.rms_norm_eps, attention, True,
    )  # fmt: skip


def main(config_file: str, tokenizer_size: int, share: int, total: int) -> None:
    """Compile one share."""
    fix_cache_keys()
    config = load_config(config_file)
    model = open_config(Path(config.model))
    dtype = resolve_dtype(config.dtype, model.dtype, resolve_device(config.device))
    sampled_vocab = min(tokenizer_size or model.vocab_size, model.vocab_size)
    for compile_one in list(compilations(config, model, dtype, sampled_vocab))[share::total]:
        compile_one()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
