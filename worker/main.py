"""The worker process: applies deltas and runs steps, one after another.

Run as `python -m worker.main CONFIG_FILE LIFELINE_FD`.
"""

import torch
import zmq

from protocol.config import EngineConfig
from protocol.lifeline import Lifeline, Ready, die_with_supervisor, exit_when_cut, run_child
from protocol.messages import PROTOCOL_VERSION, WorkerBegin, WorkerHello, WorkerReady, decode_result, decode_to_worker
from protocol.trace import NoTrace, Span, Trace, open_trace
from protocol.transport import Endpoint, check_handshake, open_socket
from worker.device_trace import StepTimer, step_timer
from worker.executor import Executor, build_executor, build_model, most_tokens
from worker.failpoint import Failpoint
from worker.results import ResultSender

IDLE_MS = 100


def connect(context: zmq.Context, kind: int, address: str, identity: str | None = None) -> zmq.Socket:
    """A socket of the scheduler's, from this side."""
    socket = open_socket(context, kind)
    if identity is not None:
        socket.identity = identity.encode()
    socket.connect(address)
    return socket


def start(config: EngineConfig, deltas: Endpoint, rank: int) -> Executor:
    """Load, shake hands, allocate and capture; once it returns, step 0 may come."""
    deltas.send(WorkerHello(PROTOCOL_VERSION, config.epoch, rank))
    model = build_model(config)
    begin = deltas.receive()
    assert isinstance(begin, WorkerBegin)
    check_handshake(PROTOCOL_VERSION, begin.epoch, PROTOCOL_VERSION, config.epoch, "the scheduler")
    executor = build_executor(config, model, begin.tokenizer_size)
    deltas.send(
        WorkerReady(
            executor.num_blocks, config.block_size, config.max_num_seqs, model.vocab_size, model.max_model_len, executor.num_host_blocks,
            executor.block_copy_s,
        )
    )  # fmt: skip
    return executor


def await_delta(deltas: Endpoint, timer: StepTimer) -> None:
    """Block until a delta has arrived, so that the span of its receipt holds no waiting; set the clocks while idle."""
    while not deltas.socket.poll(IDLE_MS):
        timer.anchor()


def serve(
    executor: Executor, deltas: Endpoint, sender: ResultSender, failpoint: Failpoint, trace: Trace | NoTrace, timer: StepTimer
) -> None:
    """Steps, until the supervisor ends this process."""
    while True:
        if trace.is_on:
            await_delta(deltas, timer)
        with trace.span(Span.RECEIVE) as span:
            delta = deltas.receive()
            span.step = delta.step
        failpoint.hit("worker.step", delta.step)
        with trace.span(Span.APPLY, delta.step):
            batch = executor.batch.apply(delta)
        with timer.step(delta.step):
            sampled_N = executor.runner.run(batch)
        with trace.span(Span.PUBLISH, delta.step):
            sender.publish(delta.step, sampled_N, batch.num_results, batch.scores_XW)


def main(config: EngineConfig, lifeline: Lifeline, index: int) -> None:
    """A worker's whole life."""
    die_with_supervisor()
    exit_when_cut(lifeline)
    failpoint = Failpoint(config.failpoint)
    failpoint.hit("worker.load", 0)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    context = zmq.Context()
    deltas = Endpoint(connect(context, zmq.DEALER, config.address("workers"), f"worker-{index}"), decode_to_worker)
    results = Endpoint(connect(context, zmq.PUSH, config.address("results")), decode_result)
    executor = start(config, deltas, index)
    lifeline.send(Ready(f"{executor.num_blocks} KV blocks of {config.block_size} tokens"))
    on_gpu = executor.batch.rows.length_R.is_cuda
    trace = open_trace(config.trace_dir, f"worker-{index}")
    timer = step_timer(trace, on_gpu)
    most_scores = config.max_num_seqs + most_tokens(config)
    sender = ResultSender(results, config.max_pipeline_depth, config.max_num_seqs, most_scores, on_gpu, trace, timer)
    serve(executor, deltas, sender, failpoint, trace, timer)


if __name__ == "__main__":
    run_child(main)
