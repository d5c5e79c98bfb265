"""What a delay between scheduler and worker costs: tokens per second by pipeline depth, without it and with it.

A step takes a fixed time; a proxy process holds each delta and each result back, together for a share of that time. Planned ahead, the
delay passes while the worker runs; at depth 1 every step waits for it. The configuration without delay runs through the proxy too.
Prints a table for people, then one JSON line.

usage: python tests/bench/channel_delay.py [--depths 1,2,4] [--step-ms 20] [--delay 0.5] [--streams 8] [--new 150] [--repeats 5]
"""

import argparse
import asyncio
import json
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from frontend.client import AsyncClient  # noqa: E402
from protocol.config import EngineConfig, save_config  # noqa: E402
from tests.bench.report import facts  # noqa: E402
from tests.checksum_reference import continuation  # noqa: E402

PROMPT, WARM_UP_TOKENS = [1, 2, 3, 4], 20


class DelayedEngine:
    """Scheduler and frontend in one run directory, the worker in another, and the proxy between the two."""

    def __init__(self, depth: int, streams: int, new: int, step_ms: float, delay_ms: float):
        """delay_ms is of the way there and back together."""
        self.processes, self.stack = [], ExitStack()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="delay-"))
        self.address = f"ipc://{folder}/engine.sock"
        config = EngineConfig(
            model="checksum", served_model_name="checksum", executor="checksum", num_threads=1, client_address=self.address,
            run_dir=f"{folder}/scheduler", epoch=secrets.randbits(63), max_num_seqs=streams, max_model_len=len(PROMPT) + new + 1,
            num_kv_blocks=streams * (new // 16 + 2), max_pipeline_depth=depth,
        )  # fmt: skip
        remote = msgspec.structs.replace(config, run_dir=f"{folder}/worker")
        for each in (config, remote):
            Path(each.run_dir).mkdir(mode=0o700)
        self._start("scheduler.main", str(save_config(config)))
        self._start("frontend.main", f"{config.run_dir}/config.json")
        self._start("tests.bench.timed_worker", str(save_config(remote)), str(step_ms))
        command = [sys.executable, "-m", "tests.bench.delay_proxy", config.run_dir, remote.run_dir, str(delay_ms / 2)]
        self.proxy = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)

    def _start(self, module: str, config_file: str, *more: str) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", module, config_file, str(theirs.fileno()), "0", *more]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)
        theirs.close()
        self.processes.append((ours, process))

    def __enter__(self) -> "DelayedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        for lifeline, process in self.processes:
            lifeline.shutdown(socket.SHUT_WR)
            process.wait(10)
            lifeline.close()
        self.proxy.stdin.close()
        self.proxy.wait(10)
        self.stack.close()


async def run_streams(address: str, streams: int, tokens: int) -> float:
    """Tokens per second."""
    prompts = [[*PROMPT[:-1], i] for i in range(streams)]
    async with AsyncClient(address, connect_timeout=60) as client:
        began = time.monotonic()
        answers = await asyncio.gather(*(client.complete(prompt_ids=p, max_tokens=tokens, temperature=0.0) for p in prompts))
        seconds = time.monotonic() - began
    assert all(answer.token_ids == continuation(p, tokens) for p, answer in zip(prompts, answers, strict=True))
    return streams * tokens / seconds


def measure(depth: int, step_ms: float, delay_ms: float, streams: int, new: int, repeats: int) -> dict[str, float]:
    """Both engines are up, and take turns: what else the machine does meets both."""
    with ExitStack() as stack:
        engines = [stack.enter_context(DelayedEngine(depth, streams, new, step_ms, delay)) for delay in (0.0, delay_ms)]
        for engine in engines:
            asyncio.run(run_streams(engine.address, streams, WARM_UP_TOKENS))
        turns = [[asyncio.run(run_streams(engine.address, streams, new)) for engine in engines] for _ in range(repeats)]
    plain, delayed = (statistics.median(rates) for rates in zip(*turns, strict=True))
    cost = statistics.median(1 - late / prompt for prompt, late in turns)
    return {"tokens_s": round(plain, 1), "delayed_tokens_s": round(delayed, 1), "cost": round(cost, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", default="1,2,4")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--delay", type=float, default=0.5, help="there and back, in steps")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--new", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    delay_ms = arguments.delay * arguments.step_ms
    results = {}
    print(f"{'depth':>6}{'tokens/s':>12}{'delayed':>10}{'cost':>8}")
    for depth in map(int, arguments.depths.split(",")):
        results[depth] = measure(depth, arguments.step_ms, delay_ms, arguments.streams, arguments.new, arguments.repeats)
        plain, delayed, cost = results[depth].values()
        print(f"{depth:>6}{plain:>12.1f}{delayed:>10.1f}{cost:>8.1%}", flush=True)
    print(json.dumps({"bench": "channel_delay", **facts(), **vars(arguments), "results": results}))


if __name__ == "__main__":
    main()
