"""A client process of the checksum tests: many concurrent requests of random lengths, some aborted at a random moment.

usage: python -m tests.checksum_client ADDRESS SEED NUM_REQUESTS ABORT_SHARE MOST_TOKENS

Prints one JSON object with counts; any wrong, lost or doubled token ends it with a traceback.
"""

import asyncio
import json
import random
import sys
from contextlib import aclosing

from frontend.client import AsyncClient
from tests.checksum_reference import VOCAB_SIZE, continuation


async def run_request(client: AsyncClient, rng: random.Random, abort_share: float, most_tokens: int) -> bool:
    """One request, checked token by token; True when it was aborted."""
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 200))]
    count = rng.randint(1, most_tokens)
    end_ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 20]))]
    expected = continuation(prompt, count, tuple(end_ids))
    abort_after = rng.randint(0, len(expected) - 1) if rng.random() < abort_share else None
    await asyncio.sleep(rng.random() * 2)
    received: list[int] = []
    options = dict(prompt_ids=prompt, max_tokens=count, stop_token_ids=end_ids or None, temperature=0.0, stream=rng.random() < 0.8)
    async with aclosing(client.generate(**options)) as outputs:
        if abort_after is not None and rng.random() < 0.3:
            try:  # at an instant rather than at a token: perhaps in the queue, perhaps before the first token
                await asyncio.wait_for(anext(outputs), rng.random() * 0.5)
            except TimeoutError:
                pass
            return True
        async for output in outputs:
            received += output.token_ids
            assert received == expected[: len(received)], f"after {len(received)} tokens of {prompt[:5]}…"
            if abort_after is not None and len(received) >= abort_after and output.finish_reason is None:
                return True
    assert received == expected
    assert output.finish_reason == ("stop" if expected[-1] in end_ids else "length")
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(prompt), len(expected))
    return False


async def main(address: str, seed: int, num_requests: int, abort_share: float, most_tokens: int) -> None:
    rng = random.Random(seed)
    async with AsyncClient(address, timeout=120, connect_timeout=30) as client:
        seeds = [random.Random(rng.random()) for _ in range(num_requests)]
        aborted = await asyncio.gather(*(run_request(client, own, abort_share, most_tokens) for own in seeds))
    print(json.dumps({"requests": num_requests, "aborted": sum(aborted)}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])))
