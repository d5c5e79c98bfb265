"""Putting a worker together: model, row state, batch and runner for the device that it runs on."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import ops, reference, reference_rows
from kernels import rows as gpu_rows
from protocol.config import EngineConfig
from worker.batch import PersistentBatch
from worker.checksum import ChecksumModel
from worker.decode import DecodeChain
from worker.graphs import DecodeGraphs, EagerDecode, GraphRunner
from worker.loading import load_model
from worker.memory import num_kv_blocks
from worker.precompile import compile_ahead, step_sizes
from worker.rows import RowState
from worker.runner import Model, Runner, StepRunner
from worker.staging import HostStaging, PinnedStaging
from worker.tuning import plan_buckets

# Host values of one step: a few arrays over its tokens, and block tables of rows that join.
STAGED_BYTES_PER_TOKEN = 64


@dataclass(frozen=True)
class Executor:
    """What the worker's loop turns: deltas into steps, steps into tokens."""

    batch: PersistentBatch
    runner: Runner
    num_blocks: int


def build_model(config: EngineConfig) -> Model:
    """The configured model with its weights."""
    if config.executor == "checksum":
        return ChecksumModel(config.max_model_len)
    return load_model(config.model, config.dtype, config.device, config.max_model_len, config.load_format)


def build_executor(config: EngineConfig, model: Model, tokenizer_size: int) -> Executor:
    """Allocate everything that steps need, and capture their graphs where there are any."""
    max_tokens = config.max_num_seqs + config.max_num_batched_tokens
    sampled_vocab = min(tokenizer_size or model.vocab_size, model.vocab_size)
    num_blocks = num_kv_blocks(config, model)
    model.allocate(num_blocks, config.block_size, max_tokens, config.max_num_seqs)
    max_blocks = -(-model.max_model_len // config.block_size)
    rows = RowState(config.max_num_seqs, max_blocks, scratch_block=num_blocks, device=model.device)
    if model.device.type == "cpu":
        runner = StepRunner(model, reference, reference_rows, rows, config.block_size, sampled_vocab)
        return Executor(PersistentBatch(rows, max_tokens, HostStaging()), runner, num_blocks)
    step_bytes = STAGED_BYTES_PER_TOKEN * max_tokens + 16 * (max_tokens + num_blocks)
    batch = PersistentBatch(rows, max_tokens, PinnedStaging(model.device, config.max_pipeline_depth, step_bytes))
    return Executor(batch, _gpu_runner(config, model, rows, batch, sampled_vocab), num_blocks)


def _gpu_runner(config: EngineConfig, model: Model, rows: RowState, batch: PersistentBatch, sampled_vocab: int) -> Runner:
    others = StepRunner(model, ops, gpu_rows, rows, config.block_size, sampled_vocab)
    if config.op_by_op:
        return others
    if config.run_dir:
        compile_ahead(Path(config.run_dir) / "config.json", sampled_vocab)
    cache_dir = Path(config.cache_dir) if config.cache_dir else None
    plans = plan_buckets(model, step_sizes(config), sampled_vocab, cache_dir, config.tune_kernels)
    chain = DecodeChain(model, rows, sampled_vocab, plans, pdl=True)
    decode = EagerDecode(chain) if config.enforce_eager else DecodeGraphs(chain, batch.decode_rows_B)
    _warm_up(others, batch, config, model)
    rows.length_R.zero_()
    torch.cuda.synchronize()
    return GraphRunner(decode, others)


def _warm_up(runner: StepRunner, batch: PersistentBatch, config: EngineConfig, model: Model) -> None:
    """Run steps of every shape that is a binary of its own: else the first requests would wait for a compiler."""
    runner.run(batch.padding_step(1, 1))
    runner.run(batch.padding_step(min(config.max_num_batched_tokens, model.max_model_len - 1), 1))
    num_seqs = 2
    while num_seqs < 2 * config.max_num_seqs:
        num_seqs = min(num_seqs, config.max_num_seqs)
        torch.cuda.synchronize()  # the staging buffer is free again
        batch.staging.begin(0)
        runner.run(batch.padding_step(num_seqs + 1, num_seqs))
        num_seqs *= 2
