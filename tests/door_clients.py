"""A client process of many concurrent streams at both doors, for so long: as one ends, another begins in its place.

usage: python -m tests.door_clients ADDRESS URL SEED NUM_HTTP NUM_ZMQ SECONDS

Every token, reason and usage is compared with the checksum model's; some streams are left in their middle. Prints one JSON object of
counts; anything wrong, lost or doubled ends it with a traceback.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from contextlib import aclosing

from frontend.client import AsyncClient
from tests.checksum_reference import VOCAB_SIZE, continuation
from tests.raw_http import RawHttp

LEAVES, IS_WHOLE = 0.05, 0.1  # shares of the streams that are left early, and of the requests that are not streamed
STREAMS_A_CONNECTION = 5


class Case:
    """One request and what has come of it."""

    def __init__(self, rng: random.Random):
        self.prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        self.expected = continuation(self.prompt, rng.randint(10, 100))
        self.streams = rng.random() >= IS_WHOLE
        self.leaves_after = rng.randrange(len(self.expected)) if self.streams and rng.random() < LEAVES else None
        self.received: list[int] = []

    def take(self, tokens: list[int]) -> bool:
        """More tokens; whether it is time to leave."""
        self.received += tokens
        assert self.received == self.expected[: len(self.received)], (self.prompt, self.received)
        return self.leaves_after is not None and len(self.received) > self.leaves_after

    def end(self, reason: str, prompt_tokens: int, completion_tokens: int) -> None:
        """The answer is complete."""
        assert (self.received, reason) == (self.expected, "length"), (self.prompt, self.received, reason)
        assert (prompt_tokens, completion_tokens) == (len(self.prompt), len(self.expected))


async def ask_http(http: RawHttp, case: Case) -> bool:
    """One request on the connection; whether it was left early."""
    body = {"prompt": case.prompt, "max_tokens": len(case.expected), "temperature": 0, "return_token_ids": True, "stream": case.streams}
    if not case.streams:
        assert await http.post("/v1/completions", body) == 200
        (choice,) = (answer := await http.json())["choices"]
        case.take(choice["token_ids"])
        case.end(choice["finish_reason"], answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])
        return False
    assert await http.post("/v1/completions", body | {"stream_options": {"include_usage": True}}) == 200
    reason = usage = done = None
    async for event in http.events():
        assert done is None
        if event == "[DONE]":
            done = event
        elif event != ": keep-alive" and event["choices"]:
            reason = event["choices"][0]["finish_reason"]
            if case.take(event["choices"][0]["token_ids"]):
                http.close()
                return True
        elif event != ": keep-alive":
            usage = event["usage"]
    assert done == "[DONE]"
    case.end(reason, usage["prompt_tokens"], usage["completion_tokens"])
    return False


async def ask_zmq(client: AsyncClient, case: Case) -> bool:
    """One request of the client; whether it was left early."""
    options = dict(prompt_ids=case.prompt, max_tokens=len(case.expected), temperature=0.0, stream=case.streams)
    async with aclosing(client.generate(**options)) as outputs:
        async for output in outputs:
            if case.take(output.token_ids) and output.finish_reason is None:
                return True
    case.end(output.finish_reason, output.usage.prompt_tokens, output.usage.completion_tokens)
    return False


async def sit_at_http(url: str, rng: random.Random, deadline: float, counts: Counter[str]) -> None:
    """One stream after another, several on each connection."""
    http, num_asked = None, 0
    while time.monotonic() < deadline:
        if http is None or num_asked % STREAMS_A_CONNECTION == 0:
            if http is not None:
                http.close()
            http = await RawHttp.connect(url)
        case = Case(rng)
        was_left = await ask_http(http, case)
        http, num_asked = None if was_left else http, num_asked + 1
        counts.update(http=1, left=was_left, tokens=len(case.received))
    if http is not None:
        http.close()


async def sit_at_zmq(client: AsyncClient, rng: random.Random, deadline: float, counts: Counter[str]) -> None:
    """One stream after another, beside the client's others."""
    while time.monotonic() < deadline:
        case = Case(rng)
        was_left = await ask_zmq(client, case)
        counts.update(zmq=1, left=was_left, tokens=len(case.received))


async def main(address: str, url: str, seed: int, num_http: int, num_zmq: int, seconds: float) -> None:
    deadline, counts = time.monotonic() + seconds, Counter()
    rngs = [random.Random(f"{seed} {index}") for index in range(num_http + num_zmq)]
    async with AsyncClient(address, timeout=120, connect_timeout=30) as client, asyncio.TaskGroup() as seats:
        for index, rng in enumerate(rngs):
            seat = sit_at_http(url, rng, deadline, counts) if index < num_http else sit_at_zmq(client, rng, deadline, counts)
            seats.create_task(seat)
    print(json.dumps(counts))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), float(sys.argv[6])))
