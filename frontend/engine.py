"""The frontend's side of the scheduler: requests out, tokens in, each to its own listener. Doors are thin over it."""

import asyncio
import itertools
from collections.abc import Iterable

import numpy as np

from frontend.admission import Admitted
from frontend.pump import Pump
from frontend.request import Choices, Failure, Listener, OpenRequest
from frontend.scores import TokenScores
from frontend.tokenizer import ModelTokenizer
from protocol.messages import AbortRequests, AddRequest, GetStats, Refused, Stats, TokenBatch, pack, unpack
from protocol.transport import Endpoint

STATS_SECONDS = 2.0
MAX_MESSAGES_PER_TURN = 64  # steps, when this process is that far behind; then clients have their turn


class EngineClient:
    """Submits admitted requests and hears of them.

    A listener is called from the event loop, once for all that arrived together for a choice, until its delta has the usage or it got
    a Failure. It must not call back. Invariant: `open` holds exactly the choices whose last word their listener has not heard.
    """

    def __init__(self, endpoint: Endpoint, tokenizer: ModelTokenizer | None):
        self.endpoint = endpoint
        self.tokenizer = tokenizer
        self.open: dict[int, OpenRequest] = {}
        self.next_handle = 1
        self.next_stats: asyncio.Future[Stats] | None = None
        self.pump = Pump(endpoint.socket, self._receive)

    def submit(self, request: Admitted, listener: Listener, streams: bool = True) -> range:
        """Hand a request to the scheduler; without `streams` its listener hears of each choice once, when it ends.

        Returns its choices' handles, for `abort`. Raises zmq.Again when the scheduler is far behind.
        """
        handles = range(self.next_handle, self.next_handle + 1 + len(request.more_seeds))
        self._send(
            AddRequest(
                handle=handles.start,
                prompt=pack(request.prompt_ids),
                generated=b"",
                max_tokens=request.max_tokens,
                end_ids=sorted(request.end_ids),
                sampling=request.sampling,
                salt=request.salt,
                priority=request.priority,
                more_seeds=request.more_seeds,
                controls=request.controls,
                is_scored=request.num_logprobs is not None,
                is_prompt_scored=request.num_prompt_logprobs is not None,
            )
        )
        self.next_handle = handles.stop
        choices, min_tokens = Choices(handles, len(request.prompt_ids), listener), request.sampling.min_tokens
        for index, handle in enumerate(handles):
            detokenizer = None if self.tokenizer is None else self.tokenizer.detokenizer(request.prompt_ids)
            scores = TokenScores(request.num_logprobs, None if index else request.num_prompt_logprobs, request.prompt_ids)
            self.open[handle] = OpenRequest(choices, index, request.end_ids, detokenizer, request.stops, min_tokens, scores, streams)
        return handles

    def abort(self, handles: Iterable[int]) -> None:
        """End choices early; their listeners get a last delta, reason "abort". Unknown handles are harmless."""
        known = [handle for handle in handles if handle in self.open]
        for handle in known:
            self._close(handle, "abort")
        if known:
            self._send(AbortRequests(known))

    async def stats(self) -> Stats:
        """A snapshot of the scheduler; callers that wait at the same time share one. Raises TimeoutError with the text for a client."""
        if self.next_stats is None:
            self.next_stats = asyncio.get_running_loop().create_future()
            self._send(GetStats())
        try:
            return await asyncio.wait_for(asyncio.shield(self.next_stats), STATS_SECONDS)
        except TimeoutError:
            raise TimeoutError(f"the scheduler has not answered for {STATS_SECONDS} s") from None

    def _send(self, message: AddRequest | AbortRequests | GetStats) -> None:
        self.endpoint.send(message)
        self.pump.poke()

    def _receive(self) -> None:
        """Take what has arrived, then tell each request's listener once."""
        touched: dict[int, OpenRequest] = {}
        finished: dict[int, str] = {}
        for message in itertools.islice(self.endpoint.drain(), MAX_MESSAGES_PER_TURN):
            match message:
                case TokenBatch():
                    self._take_tokens(message, touched)
                    finished.update((last.handle, last.reason) for last in message.finished)
                case Refused(handle, code, text):
                    self._fail(handle, Failure(code, text))
                case Stats():
                    self._take_stats(message)
        for handle, reason in finished.items():
            touched.pop(handle, None)
            if handle in self.open:
                self._close(handle, reason)
        self._tell(touched)

    def _take_tokens(self, batch: TokenBatch, touched: dict[int, OpenRequest]) -> None:
        for started in batch.started:
            request = self.open.get(started.handle)
            if request is not None and request.index == 0:
                request.choices.num_cached = started.num_cached
        scores: dict[int, bytes] = {}
        for scored in batch.scores:
            if not scored.is_prompt:
                scores[scored.handle] = scored.data
            elif (request := self.open.get(scored.handle)) is not None:
                request.scores.add_prompt(scored.data)
        handles = np.frombuffer(batch.handles, dtype="<i8").tolist()
        for handle, token in zip(handles, unpack(batch.tokens).tolist(), strict=True):
            request = self.open.get(handle)
            if request is not None:  # else it was aborted while the token was on its way
                request.accept(token, scores.get(handle))
                touched[handle] = request

    def _tell(self, touched: dict[int, OpenRequest]) -> None:
        stopped = [handle for handle, request in touched.items() if request.finish_reason is not None]
        for handle in stopped:
            del self.open[handle]
        if stopped:  # by a stop string, of which the scheduler knows nothing
            self._send(AbortRequests(stopped))
        for request in touched.values():
            if request.streams or request.finish_reason is not None:
                request.choices.listener(request.take_delta())

    def _take_stats(self, stats: Stats) -> None:
        if self.next_stats is not None:
            self.next_stats.set_result(stats)
            self.next_stats = None

    def _close(self, handle: int, reason: str) -> None:
        request = self.open.pop(handle)
        request.finish(reason)
        request.choices.listener(request.take_delta())

    def _fail(self, handle: int, failure: Failure) -> None:
        """A refused choice ends its whole request."""
        request = self.open.get(handle)
        if request is None:
            return
        others = [other for other in request.choices.handles if self.open.pop(other, None) is not None and other != handle]
        if others:
            self._send(AbortRequests(others))
        request.choices.listener(failure)
