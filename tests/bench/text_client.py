"""A client process of text_streams.py: streams side by side, with when their parts came.

usage: python -m tests.bench.text_client whole|zmq|http PLACE NUM_STREAMS PROMPT_TOKENS NEW_TOKENS SEED

Prints one JSON object: monotonic seconds of the first send and the last part, the number of parts, and the 99th percentile of
the gaps within streams.
"""

import asyncio
import json
import random
import statistics
import sys
import time

from frontend.client import AsyncClient
from tests.raw_http import RawHttp

USAGE = b'"completion_tokens":'


async def stream_zmq(client: AsyncClient, prompt: list[int], new: int, streams: bool, times: list[float]) -> None:
    """The moments of its outputs."""
    num_tokens = 0
    async for output in client.generate(prompt_ids=prompt, max_tokens=new, ignore_eos=True, temperature=0.0, stream=streams):
        times.append(time.monotonic())
        num_tokens += len(output.token_ids)
    assert num_tokens == new == output.usage.completion_tokens


async def stream_http(url: str, prompt: list[int], new: int, times: list[float]) -> None:
    """The moments of its events; only the usage is read, so that the client costs little."""
    http = await RawHttp.connect(url)
    body = {"prompt": prompt, "max_tokens": new, "ignore_eos": True, "temperature": 0, "stream": True}
    assert await http.post("/v1/completions", body | {"stream_options": {"include_usage": True}}) == 200
    tail = b""
    async for part in http.read():
        times += [time.monotonic()] * part.count(b'"choices":[{')
        tail = (tail + part)[-600:]
    assert USAGE + str(new).encode() in tail and tail.endswith(b"data: [DONE]\n\n")
    http.close()


async def main(door: str, place: str, num_streams: int, prompt_tokens: int, new: int, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, 500) for _ in range(prompt_tokens)] for _ in range(num_streams)]
    times: list[list[float]] = [[] for _ in prompts]
    sent = time.monotonic()
    if door == "http":
        await asyncio.gather(*(stream_http(place, prompt, new, own) for prompt, own in zip(prompts, times, strict=True)))
    else:
        async with AsyncClient(place, timeout=300, connect_timeout=30) as client:
            streams = (stream_zmq(client, prompt, new, door == "zmq", own) for prompt, own in zip(prompts, times, strict=True))
            await asyncio.gather(*streams)
    gaps = [later - earlier for own in times for earlier, later in zip(own, own[1:], strict=False)] or [0.0, 0.0]
    report = {
        "sent": sent, "last": max(own[-1] for own in times),
        "parts": sum(map(len, times)), "gap_p99": statistics.quantiles(gaps, n=100)[98],
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
