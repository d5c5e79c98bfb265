"""More than the engine can take, through the real processes: prompts beyond the pool, requests beyond the queue, thousands at once."""

import asyncio
import time

import pytest

from frontend.client import AsyncClient, Client, EngineError
from tests.checksum_reference import continuation
from tests.engine_process import EngineProcess
from tests.test_checksum_engine import FLAGS, assert_back_to_start, idle_stats


def test_a_context_longer_than_the_pool_is_lowered_to_it_and_nobody_waits_for_ever():
    """A pool of 1,024 tokens and --max-model-len 4096."""
    with EngineProcess(*FLAGS, "--num-kv-blocks", "64", "--max-model-len", "4096") as engine, Client(engine.address, timeout=20) as client:
        assert client.info().max_model_len == 1024
        with pytest.raises(EngineError, match="2000 tokens.* 1024") as refused:
            client.complete(prompt_ids=[1] * 2000, max_tokens=5)
        assert refused.value.code == 400
        grown = client.complete(prompt_ids=[2] * 900, max_tokens=1000, temperature=0.0)
        assert (grown.finish_reason, grown.token_ids) == ("length", continuation([2] * 900, 124))
        for i in range(5):
            assert client.complete(prompt_ids=[i], max_tokens=5, temperature=0.0).token_ids == continuation([i], 5)
        assert_back_to_start(idle_stats(client))


async def send_all(address: str, count: int, max_tokens: int) -> tuple[int, list[EngineError], float]:
    """How many were answered, each rightly; the refusals, and when the last of them came, in seconds."""
    async with AsyncClient(address, timeout=60, connect_timeout=30) as client:
        began, refusals, last_refusal = time.monotonic(), [], 0.0

        async def send(i: int) -> bool:
            nonlocal last_refusal
            try:
                answer = await client.complete(prompt_ids=[i % 1000, i // 1000], max_tokens=max_tokens, temperature=0.0)
            except EngineError as error:
                refusals.append(error)
                last_refusal = time.monotonic() - began
                return False
            assert answer.token_ids == continuation([i % 1000, i // 1000], max_tokens)
            return True

        answered = sum(await asyncio.gather(*(send(i) for i in range(count))))
    return answered, refusals, last_refusal


def test_beyond_rows_and_queue_requests_are_refused_at_once_and_the_others_served():
    flags = ("--max-num-seqs", "64", "--max-queued-requests", "64", "--num-kv-blocks", "3000")
    with EngineProcess(*FLAGS, *flags) as engine, Client(engine.address) as client:
        answered, refusals, last_refusal = asyncio.run(send_all(engine.address, count=500, max_tokens=600))
        assert 64 <= answered <= 300 and answered + len(refusals) == 500
        assert all(error.code == 503 and "queue is full" in error.message for error in refusals)
        assert last_refusal < 2
        stats = idle_stats(client)
        assert_back_to_start(stats)
        assert stats["num_generated_tokens"] == 600 * answered


def test_two_thousand_requests_at_once_are_all_answered():
    flags = ("--max-num-seqs", "64", "--max-queued-requests", "2000")
    with EngineProcess(*FLAGS, *flags) as engine, Client(engine.address) as client:
        answered, refusals, _ = asyncio.run(send_all(engine.address, count=2000, max_tokens=3))
        assert (answered, refusals) == (2000, [])
        assert_back_to_start(idle_stats(client))
