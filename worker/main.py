"""The worker process: applies deltas and runs steps, one after another.

Run as `python -m worker.main CONFIG_FILE LIFELINE_FD`.
"""

import logging

import torch
import zmq

from kernels import reference
from protocol.config import EngineConfig
from protocol.lifeline import Lifeline, Ready, die_with_supervisor, exit_when_cut, run_child
from protocol.messages import PROTOCOL_VERSION, WorkerBegin, WorkerReady, decode_result, decode_to_worker
from protocol.transport import Endpoint, check_handshake, open_socket
from worker.batch import PersistentBatch
from worker.checksum import ChecksumModel
from worker.failpoint import Failpoint
from worker.loading import load_model
from worker.results import ResultSender
from worker.rows import RowState
from worker.runner import Model, StepRunner
from worker.staging import HostStaging

log = logging.getLogger(__name__)


RANK = 0  # one worker so far


def build_model(config: EngineConfig) -> Model:
    """The configured model with its weights."""
    if config.executor == "checksum":
        return ChecksumModel(config.max_model_len)
    return load_model(config.model, config.dtype, config.device, config.max_model_len)


def num_kv_blocks(config: EngineConfig, model: Model) -> int:
    """Blocks of the KV pool: what kv_cache_gib holds, but no more than full contexts in every row."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = model.kv_bytes_per_token * config.block_size
    affordable = int(config.kv_cache_gib * 2**30) // block_bytes
    useful = config.max_num_seqs * -(-model.max_model_len // config.block_size)
    if affordable < 1:
        raise ValueError(f"--kv-cache-gib must hold at least one block of {block_bytes} bytes, got {config.kv_cache_gib}")
    return min(affordable, useful)


def connect(context: zmq.Context, kind: int, address: str, identity: str | None = None) -> zmq.Socket:
    """A socket of the scheduler's, from this side."""
    socket = open_socket(context, kind)
    if identity is not None:
        socket.identity = identity.encode()
    socket.connect(address)
    return socket


def main(config: EngineConfig, lifeline: Lifeline) -> None:
    """Serve steps until the supervisor ends this process."""
    die_with_supervisor()
    exit_when_cut(lifeline)
    failpoint = Failpoint(config.failpoint)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    failpoint.hit("worker.load", 0)
    model = build_model(config)
    num_blocks = num_kv_blocks(config, model)
    max_tokens = config.max_num_seqs + config.max_num_batched_tokens
    model.allocate(num_blocks, config.block_size, max_tokens, config.max_num_seqs)

    context = zmq.Context()
    deltas = Endpoint(connect(context, zmq.DEALER, config.address("workers"), f"worker-{RANK}"), decode_to_worker)
    results = Endpoint(connect(context, zmq.PUSH, config.address("results")), decode_result)
    sender = ResultSender(results, config.max_pipeline_depth, config.max_num_seqs)
    deltas.send(
        WorkerReady(
            PROTOCOL_VERSION, config.epoch, RANK, num_blocks, config.block_size,
            config.max_num_seqs, model.vocab_size, model.max_model_len,
        )  # fmt: skip
    )
    lifeline.send(Ready(f"{num_blocks} KV blocks of {config.block_size} tokens"))
    begin = deltas.receive()
    assert isinstance(begin, WorkerBegin)
    check_handshake(PROTOCOL_VERSION, begin.epoch, PROTOCOL_VERSION, config.epoch, "the scheduler")

    max_blocks = -(-model.max_model_len // config.block_size)
    rows = RowState(config.max_num_seqs, max_blocks, scratch_block=num_blocks, device=torch.device("cpu"))
    batch = PersistentBatch(rows, max_tokens, HostStaging())
    runner = StepRunner(model, reference, rows, config.block_size, begin.sampled_vocab)
    while True:
        delta = deltas.receive()
        failpoint.hit("worker.step", delta.step)
        step = batch.apply(delta)
        sender.publish(delta.step, runner.run(step), step.num_results)


if __name__ == "__main__":
    run_child(main)
