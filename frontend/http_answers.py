"""What comes for the prompts of one HTTP request, until it is read."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

from frontend.admission import Admitted
from frontend.engine import EngineClient
from frontend.request import Delta, Failure, join_deltas
from protocol.messages import Usage

MAX_UNREAD_PARTS = 64  # of a choice; then they are joined, so that a slow reader holds its output and little more
# No client may take a broken answer for a whole one.
BROKEN = {"error": "the request failed: the model's output was not finite", "abort": "the request was aborted"}


class Refusal(Exception):
    """A request that ends with an error: before any output, or in its place."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code, self.message = code, message


class Answers:
    """Deltas of every choice, joined while nobody reads them. Closing aborts what is open."""

    def __init__(self, engine: EngineClient, arrived: float):
        self.engine, self.arrived_at = engine, arrived
        self.handles: list[range] = []
        self.news: dict[int, list[Delta]] = {}  # by the choice's index in the answer
        self.usages: list[Usage] = []
        self.failure: Failure | None = None
        self.has_news = asyncio.Event()

    def submit(self, request: Admitted, streams: bool) -> None:
        """Hand one prompt to the engine; its choices come after those of the prompts before. Raises Unavailable."""
        first = sum(map(len, self.handles))

        def listen(news: Delta | Failure) -> None:
            if isinstance(news, Failure):
                self.failure = news
            else:
                self._take(first + news.index, news)
            self.has_news.set()

        self.handles.append(self.engine.submit(request, listen, streams, self.arrived_at))

    def _take(self, index: int, delta: Delta) -> None:
        parts = self.news.setdefault(index, [])
        parts.append(delta)
        if len(parts) == MAX_UNREAD_PARTS:
            parts[:] = [join_deltas(parts)]
        if delta.usage is not None:
            self.usages.append(delta.usage)
        if delta.finish_reason in BROKEN:
            self.failure = Failure(500, BROKEN[delta.finish_reason])

    async def heard(self, timeout_s: float) -> None:
        """Wait for the first news, so long at most. Raises Refusal when it is one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.has_news.wait()
        if self.failure is not None:
            self.close()
            raise Refusal(self.failure.code, self.failure.message)

    async def read(self, timeout_s: float | None = None) -> AsyncIterator[list[tuple[int, Delta]]]:
        """What has come, joined by choice, until the last usage; an empty list after so long without anything. Raises Refusal."""
        while True:
            try:
                async with asyncio.timeout(timeout_s):  # wait_for would start a task for every part
                    await self.has_news.wait()
            except TimeoutError:
                yield []
                continue
            self.has_news.clear()
            if self.failure is not None:
                raise Refusal(self.failure.code, self.failure.message)
            news, self.news = self.news, {}
            if news:
                yield [(index, join_deltas(deltas)) for index, deltas in sorted(news.items())]
            if len(self.usages) == len(self.handles) and not self.news:
                return

    async def collect(self) -> list[Delta]:
        """Every choice, whole, of prompts that were submitted without streaming: each comes once, when it ends."""
        by_choice: dict[int, Delta] = {}
        async with aclosing(self.read()) as parts:
            async for part in parts:
                by_choice.update(part)
        return [by_choice[index] for index in sorted(by_choice)]

    def close(self) -> None:
        """Abort what has not ended. Harmless when everything has."""
        self.engine.abort(itertools.chain.from_iterable(self.handles))
