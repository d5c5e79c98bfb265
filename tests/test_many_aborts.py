"""Thousands of streams that their clients give up, through the real processes: nothing stays, and nobody waits beside idle rows."""

import asyncio
import random
import time

import psutil
import pytest

from frontend.client import AsyncClient, Client
from tests.checksum_reference import continuation
from tests.engine_process import EngineProcess
from tests.test_checksum_engine import FLAGS, assert_back_to_start, idle_stats

LONGEST_IDLE_S = 2.0


async def stream_and_leave(client: AsyncClient, prompt: list[int], num_read: int) -> None:
    """Read so many tokens, check them, and close the stream in its middle."""
    tokens: list[int] = []
    outputs = client.generate(prompt_ids=prompt, max_tokens=400, temperature=0.0)
    async for output in outputs:
        tokens += output.token_ids
        if len(tokens) >= num_read:
            break
    await outputs.aclose()
    assert tokens == continuation(prompt, len(tokens))


async def watch(client: AsyncClient, done: asyncio.Event) -> float:
    """The longest time in seconds for which requests waited while none ran."""
    longest, idle_since = 0.0, None
    while not done.is_set():
        stats, now = (await client.info()).stats, time.monotonic()
        is_idle = stats["num_waiting"] > 0 and stats["num_running"] == 0
        idle_since = (idle_since or now) if is_idle else None
        longest = max(longest, now - idle_since if idle_since else 0.0)
        await asyncio.sleep(0.05)
    return longest


async def run_streams(address: str, count: int) -> float:
    """All at once, from one client, beside another that watches; what `watch` saw."""
    rng, done = random.Random(0), asyncio.Event()
    async with AsyncClient(address, timeout=100) as client, AsyncClient(address, timeout=100) as watcher:
        watching = asyncio.create_task(watch(watcher, done))
        streams = (stream_and_leave(client, [i % 1000, i // 1000], rng.randint(1, 30)) for i in range(count))
        await asyncio.gather(*streams)
        done.set()
        return await watching


@pytest.mark.parametrize("flags", [(), ("--swap-space", "0.01", "--preemption-mode", "swap")], ids=["recompute", "swap"])
def test_two_thousand_streams_left_in_the_middle_leave_nothing_behind(flags):
    limits = ("--max-num-seqs", "64", "--num-kv-blocks", "100", "--max-model-len", "640", "--max-num-queued-reqs", "4000")
    with EngineProcess(*FLAGS, *limits, *flags) as engine, Client(engine.address) as client:
        roles = [psutil.Process(engine.pid_of(role)) for role in ("worker", "scheduler", "frontend")]
        asyncio.run(run_streams(engine.address, 200))  # what is allocated once
        assert_back_to_start(idle_stats(client))
        before = [(role.num_fds(), role.num_threads()) for role in roles]
        memory = [role.memory_info().rss for role in roles]
        longest_idle = asyncio.run(run_streams(engine.address, 2000))
        stats = idle_stats(client)
        assert_back_to_start(stats)
        assert stats["free_host_blocks"] == stats["total_host_blocks"]
        assert [(role.num_fds(), role.num_threads()) for role in roles] == before
        assert all(role.memory_info().rss < then + 2**24 for role, then in zip(roles, memory, strict=True))
        assert longest_idle < LONGEST_IDLE_S
