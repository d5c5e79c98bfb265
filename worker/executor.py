"""Putting a worker together: model, row state, batch and runner for the device that it runs on."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import ops, reference, reference_rows
from kernels import rows as gpu_rows
from protocol.config import EngineConfig
from protocol.messages import Swap, pack
from worker.batch import PersistentBatch
from worker.checksum import ChecksumModel
from worker.controls import Controls
from worker.decode import DecodeChain
from worker.graphs import DecodeGraphs, EagerDecode, GraphRunner
from worker.loading import load_model
from worker.memory import explain_out_of_memory, measure_use, num_host_blocks, num_kv_blocks
from worker.precompile import compile_ahead, step_sizes
from worker.rows import RowState, SamplingKind
from worker.runner import Model, Runner, StepRunner
from worker.staging import HostStaging, PinnedStaging
from worker.swap import AT_ONCE, BlockSwapper, DeviceLane, HostLane
from worker.tuning import plan_buckets

log = logging.getLogger(__name__)

# Host values of one step: a few arrays over its tokens, and block tables of rows that join.
STAGED_BYTES_PER_TOKEN = 64


@dataclass(frozen=True)
class Executor:
    """What the worker's loop turns: deltas into steps, steps into tokens."""

    batch: PersistentBatch
    runner: Runner
    num_blocks: int
    num_host_blocks: int = 0
    block_copy_s: float = 0.0  # measured, where there are any


def build_model(config: EngineConfig) -> Model:
    """The configured model with its weights. Raises ValueError where they do not fit into a GPU."""
    if config.executor == "checksum":
        return ChecksumModel(config.max_model_len)
    with explain_out_of_memory("the weights", "they need a larger GPU, or what else runs on this one must end"):
        return load_model(config.model, config.dtype, config.device, config.max_model_len, config.load_format)


def build_executor(config: EngineConfig, model: Model, tokenizer_size: int) -> Executor:
    """Allocate everything that steps need, and capture their graphs where there are any. Raises ValueError where it does not fit."""
    sampled_vocab = min(tokenizer_size or model.vocab_size, model.vocab_size)
    build = _cpu_executor if model.device.type == "cpu" else _gpu_executor
    return build(config, model, sampled_vocab)


def _cpu_executor(config: EngineConfig, model: Model, sampled_vocab: int) -> Executor:
    num_blocks = num_kv_blocks(config, model)
    model.allocate_pools(num_blocks, config.block_size)
    model.allocate_buffers(most_tokens(config), config.max_num_seqs)
    rows = _row_state(config, model, num_blocks)
    runner = StepRunner(model, reference, reference_rows, rows, config.block_size, sampled_vocab)
    staging, num_places = HostStaging(), num_host_blocks(config, model)
    swapper = BlockSwapper(model.kv_CP, num_places, HostLane(), staging) if num_places else None
    return _executor(PersistentBatch(rows, most_tokens(config), staging, swapper), runner, num_blocks)


def _executor(batch: PersistentBatch, runner: Runner, num_blocks: int) -> Executor:
    """With the time that a copy to host memory takes, where there is any."""
    if batch.swapper is None:
        return Executor(batch, runner, num_blocks)
    block_copy_s = batch.swapper.seconds_per_block()
    log.info("%d blocks fit into the swap space; copying one takes %.0f µs", batch.swapper.num_places, 1e6 * block_copy_s)
    return Executor(batch, runner, num_blocks, batch.swapper.num_places, block_copy_s)


def _gpu_executor(config: EngineConfig, model: Model, sampled_vocab: int) -> Executor:
    if config.run_dir and not config.op_by_op:
        compile_ahead(Path(config.run_dir) / "config.json", sampled_vocab)  # its processes need memory too, so before the pool
    num_graphs = 0 if config.op_by_op or config.enforce_eager else len(step_sizes(config)) * len(SamplingKind)
    with explain_out_of_memory("the activations of the largest step", "lower --max-num-batched-tokens or --max-num-seqs"):
        use = measure_use(model.device, lambda: _rehearse(config, model, sampled_vocab), num_graphs)
    num_blocks = num_kv_blocks(config, model, use)
    gib = model.kv_bytes_per_token * config.block_size * num_blocks / 2**30
    remedy = "lower --gpu-memory-utilization, or --num-kv-blocks where it is set"
    with explain_out_of_memory(f"a KV cache of {gib:.2f} GiB", remedy):
        model.allocate_pools(num_blocks, config.block_size)
    remedy = "lower --gpu-memory-utilization or --max-num-seqs, or set --enforce-eager"
    with explain_out_of_memory("the graphs of decode steps", remedy):
        batch, others = _steps(config, model, num_blocks, sampled_vocab, num_host_blocks(config, model))
        if config.op_by_op:
            return _executor(batch, others, num_blocks)
        chain = _decode_chain(config, others, config.tune_kernels)
        decode = EagerDecode(chain) if config.enforce_eager else DecodeGraphs(chain, batch.decode_rows_B)
        return _executor(batch, GraphRunner(decode, others), num_blocks)


def _rehearse(config: EngineConfig, model: Model, sampled_vocab: int) -> None:
    """Allocate what steps need, and run them over a pool that holds the scratch block alone: every shape that is a binary of its own,
    else the first requests would wait for a compiler, and the largest."""
    model.allocate_buffers(most_tokens(config), config.max_num_seqs)
    model.allocate_pools(0, config.block_size)
    batch, runner = _steps(config, model, 0, sampled_vocab, min(AT_ONCE, num_host_blocks(config, model)))
    if batch.swapper is not None:
        places = range(batch.swapper.num_places)
        batch.swapper.run([Swap(is_out, pack([0 for _ in places]), pack(places)) for is_out in (True, False)])
    if not config.op_by_op:
        # Buffers for the first candidates, since timing any needs the pool: splits of a product's sum may add a few MiB.
        runner = GraphRunner(EagerDecode(_decode_chain(config, runner, tune=False)), runner)
    for step, (num_tokens, num_seqs) in enumerate(rehearsed_steps(config, model.max_model_len), start=1):
        batch.rows.length_R.zero_()  # the scratch row's grows, which belongs to all chunks
        torch.cuda.synchronize()  # a staging buffer is free again
        batch.staging.begin(step)
        runner.run(batch.padding_step(num_tokens, num_seqs))


def rehearsed_steps(config: EngineConfig, max_model_len: int) -> list[tuple[int, int]]:
    """Tokens and sequences of the steps to run ahead; the last one is the largest in both, and no chunk is longer than a context."""
    most, longest = config.max_num_seqs, max_model_len - 1
    powers = sorted({min(2**i, most) for i in range(1, most.bit_length() + 1)})
    chunks = [(1, 1), (min(config.max_num_batched_tokens, longest), 1)]
    return [*chunks, *((count + 1, count) for count in powers), (min(most_tokens(config), most * longest), most)]


def most_tokens(config: EngineConfig) -> int:
    """At most so many tokens are in a step: every decoding row's, and a budget of prompt tokens."""
    return config.max_num_seqs + config.max_num_batched_tokens


def _row_state(config: EngineConfig, model: Model, num_blocks: int) -> RowState:
    max_blocks = -(-model.max_model_len // config.block_size)
    controls = Controls(config.max_num_seqs, model.vocab_size, model.device)
    return RowState(config.max_num_seqs, max_blocks, scratch_block=num_blocks, device=model.device, controls=controls)


def _steps(
    config: EngineConfig, model: Model, num_blocks: int, sampled_vocab: int, num_places: int
) -> tuple[PersistentBatch, StepRunner]:
    """A GPU's batch, and what runs any step of it."""
    rows, max_tokens = _row_state(config, model, num_blocks), most_tokens(config)
    step_bytes = STAGED_BYTES_PER_TOKEN * max_tokens + 16 * (max_tokens + num_blocks)
    staging = PinnedStaging(model.device, config.max_pipeline_depth, step_bytes)
    swapper = BlockSwapper(model.kv_CP, num_places, DeviceLane(model.device), staging) if num_places else None
    batch = PersistentBatch(rows, max_tokens, staging, swapper)
    return batch, StepRunner(model, ops, gpu_rows, rows, config.block_size, sampled_vocab)


def _decode_chain(config: EngineConfig, steps: StepRunner, tune: bool) -> DecodeChain:
    cache_dir = Path(config.cache_dir) if config.cache_dir else None
    plans = plan_buckets(steps.model, step_sizes(config), steps.sampled_vocab, cache_dir, tune)
    return DecodeChain(steps.model, steps.rows, steps.sampled_vocab, plans, pdl=True)
