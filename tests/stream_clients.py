"""A client process of many streams at once, with the moment of each token; every token is compared with the checksum model's.

usage: python -m tests.stream_clients ADDRESS SEED NUM_STREAMS PROMPT_TOKENS NEW_TOKENS

All streams start together. Prints one JSON object: tokens, seconds from the first start to the last token, the longest time in which
no stream got a token after the first did, and the longest gap within one stream.
"""

import asyncio
import json
import random
import sys
import time
from contextlib import aclosing

from frontend.client import AsyncClient
from tests.checksum_reference import VOCAB_SIZE, continuation


async def run_stream(client: AsyncClient, prompt: list[int], expected: list[int], arrivals: list[float]) -> float:
    """One stream; adds the moment of each of its outputs to arrivals, returns its longest gap in seconds."""
    received: list[int] = []
    gap, last = 0.0, None
    options = dict(prompt_ids=prompt, max_tokens=len(expected), temperature=0.0, ignore_eos=True)
    async with aclosing(client.generate(**options)) as outputs:
        async for output in outputs:
            received += output.token_ids
            now = time.monotonic()
            arrivals.append(now)
            gap, last = max(gap, now - (last or now)), now
    assert output.usage.completion_tokens == len(expected)
    assert received == expected
    return gap


async def main(address: str, seed: int, num_streams: int, prompt_tokens: int, new_tokens: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(prompt_tokens)] for _ in range(num_streams)]
    streams = [(prompt, continuation(prompt, new_tokens)) for prompt in prompts]
    arrivals: list[float] = []
    async with AsyncClient(address, connect_timeout=30) as client:
        began = time.monotonic()
        gaps = await asyncio.gather(*(run_stream(client, *stream, arrivals) for stream in streams))
    stall = max(later - earlier for earlier, later in zip(arrivals, arrivals[1:], strict=False))
    seconds = arrivals[-1] - began
    print(json.dumps({"tokens": num_streams * new_tokens, "seconds": seconds, "longest_stall": stall, "longest_gap": max(gaps)}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
