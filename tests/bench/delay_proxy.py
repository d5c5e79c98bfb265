"""A proxy in the channel between scheduler and worker that hands every message on a fixed time after it came.

Run as `python -m tests.bench.delay_proxy SCHEDULER_DIR WORKER_DIR DELAY_MS`: it connects to the scheduler's sockets in the one
folder and owns those that the worker finds in the other. Ends with its parent's end of standard input.
"""

import sys
import time
from collections import deque

import zmq

from protocol.transport import bind, open_socket

WORKER = b"worker-0"
SPIN_S = 0.5e-3  # the poller's milliseconds are too coarse for the rest of a delay


class DelayLine:
    """Messages from one socket to another, in order, each delay_s after it came; prefix is put before their frames."""

    def __init__(self, source: zmq.Socket, target: zmq.Socket, delay_s: float, prefix: list[bytes], num_dropped: int):
        self.source, self.target, self.delay_s = source, target, delay_s
        self.prefix, self.num_dropped = prefix, num_dropped
        self.queue: deque[tuple[float, list[bytes]]] = deque()

    def take(self) -> None:
        """Take in all that has come; the first num_dropped frames of each are the routing of this side."""
        while True:
            try:
                frames = self.source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.queue.append((time.monotonic() + self.delay_s, self.prefix + frames[self.num_dropped :]))

    def pass_on(self) -> None:
        """Send what is due."""
        while self.queue and self.queue[0][0] <= time.monotonic():
            self.target.send_multipart(self.queue.popleft()[1])


def lines(scheduler_dir: str, worker_dir: str, delay_s: float) -> list[DelayLine]:
    """Deltas down, greetings and results up."""
    context = zmq.Context()
    to_scheduler, to_worker = open_socket(context, zmq.DEALER), open_socket(context, zmq.ROUTER)
    results_up, results_in = open_socket(context, zmq.PUSH), open_socket(context, zmq.PULL)
    to_scheduler.identity = WORKER
    to_scheduler.connect(f"ipc://{scheduler_dir}/workers")
    results_up.connect(f"ipc://{scheduler_dir}/results")
    bind(to_worker, f"ipc://{worker_dir}/workers")
    bind(results_in, f"ipc://{worker_dir}/results")
    return [
        DelayLine(to_scheduler, to_worker, delay_s, [WORKER], 0),
        DelayLine(to_worker, to_scheduler, delay_s, [], 1),
        DelayLine(results_in, results_up, delay_s, [], 0),
    ]


def main(scheduler_dir: str, worker_dir: str, delay_s: float) -> None:
    """Serve until standard input ends."""
    channels = lines(scheduler_dir, worker_dir, delay_s)
    poller = zmq.Poller()
    for readable in (sys.stdin.fileno(), *(line.source for line in channels)):
        poller.register(readable, zmq.POLLIN)
    while True:
        due = min((line.queue[0][0] for line in channels if line.queue), default=None)
        wait_s = None if due is None else due - time.monotonic() - SPIN_S
        if sys.stdin.fileno() in dict(poller.poll(None if wait_s is None else max(0, int(wait_s * 1e3)))):
            return
        for line in channels:
            line.take()
            line.pass_on()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1e3)
