"""A client process that sends short unique prompts, a fixed number of them open at a time; every answer is checked.

usage: python -m tests.flood_client ADDRESS FIRST COUNT OPEN

Prompt number i is unlike any other; the numbers run from FIRST to FIRST + COUNT. A wrong token ends the process with a traceback.
"""

import asyncio
import sys
from collections.abc import Iterator

from frontend.client import AsyncClient
from tests.checksum_reference import VOCAB_SIZE, continuation

NEW_TOKENS = 2


def prompt_of(number: int) -> list[int]:
    """Seven tokens that spell the number; the first differ most, so that no two share blocks."""
    return [number % VOCAB_SIZE, number // VOCAB_SIZE % VOCAB_SIZE, number // VOCAB_SIZE**2, 3, 1, 4, 1]


async def work(client: AsyncClient, numbers: Iterator[int]) -> None:
    """One request after another, until the numbers run out."""
    for number in numbers:
        prompt = prompt_of(number)
        answer = await client.complete(prompt_ids=prompt, max_tokens=NEW_TOKENS, temperature=0.0)
        assert answer.token_ids == continuation(prompt, NEW_TOKENS), f"prompt {number}: {answer}"
        assert (answer.finish_reason, answer.usage.cached_tokens) == ("length", 0), f"prompt {number}: {answer}"


async def main(address: str, first: int, count: int, num_open: int) -> None:
    numbers = iter(range(first, first + count))
    async with AsyncClient(address, connect_timeout=30) as client:
        await asyncio.gather(*(work(client, numbers) for _ in range(num_open)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
