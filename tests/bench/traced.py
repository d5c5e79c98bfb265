"""Runs of the real processes with tracing, for the benches: greedy requests, their tokens, and the trace of each run."""

import asyncio
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from frontend.client import AsyncClient
from tests.bench.timelines import Timeline
from tests.engine_process import EngineProcess

MOST_PROMPT_TOKENS = 128
# Around a run: the last spans end after the last answer has come, and the worker sets its device's clock when it is idle.
QUIET_S = 0.25
PROMPT_IDS = range(3, 999)  # every vocabulary has them, the checksum model's too


@dataclass(frozen=True)
class Request:
    """A prompt and the number of tokens to generate."""

    prompt: list[int]
    new: int


@dataclass(frozen=True)
class Run:
    """What came of the requests. The trace holds this run alone."""

    outputs: list[list[int]]
    seconds: float
    timeline: Timeline

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(map(len, self.outputs))


def mixed_requests(count: int, new: int) -> list[Request]:
    """Random prompts of 1 to 128 tokens, with new / 2 to new tokens to follow; the same ones every time."""
    rng = random.Random(count)
    sizes = [(rng.randint(1, MOST_PROMPT_TOKENS), rng.randint(-(-new // 2), new)) for _ in range(count)]
    return [Request(rng.choices(PROMPT_IDS, k=length), limit) for length, limit in sizes]


def trace_runs(flags: list[str], batches: list[list[Request]]) -> list[Run]:
    """Run batches of requests on a fresh engine, one batch after the other, each after a short warm-up of the same shape."""
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        engine = EngineProcess(*flags, "--trace", folder)
        try:
            engine.wait_ready()
            windows = asyncio.run(_run_all(engine.address, batches))
            engine.stop(timeout_s=30)
            whole = Timeline.read(folder)
        except BaseException:
            print(engine.errors()[-3000:], file=sys.stderr)
            raise
        finally:
            engine.kill_all()
    return [Run(outputs, seconds, whole.within(begin, end)) for outputs, seconds, begin, end in windows]


async def _run_all(address: str, batches: list[list[Request]]) -> list[tuple[list[list[int]], float, int, int]]:
    """Of each batch its outputs, how long it took, and the window that its spans lie in."""
    windows = []
    async with AsyncClient(address, timeout=300) as client:
        for requests in batches:
            # Backwards, so that no prefix cache knows the prompts of the run.
            await _generate(client, [Request(request.prompt[::-1], 4) for request in requests])
            await asyncio.sleep(QUIET_S)
            begin = time.monotonic_ns()
            outputs = await _generate(client, requests)
            seconds = (time.monotonic_ns() - begin) / 1e9
            await asyncio.sleep(QUIET_S)
            windows.append((outputs, seconds, begin, time.monotonic_ns()))
    return windows


async def _generate(client: AsyncClient, requests: list[Request]) -> list[list[int]]:
    options = dict(temperature=0.0, ignore_eos=True)
    work = [client.complete(prompt_ids=request.prompt, max_tokens=request.new, **options) for request in requests]
    outputs = [answer.token_ids for answer in await asyncio.gather(*work)]
    assert [len(output) for output in outputs] == [request.new for request in requests]
    return outputs


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
