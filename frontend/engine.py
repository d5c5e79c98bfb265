"""The frontend's side of the scheduler: requests out, tokens in, each to its own listener. Doors are thin over it."""

import asyncio
import itertools
import time
from collections.abc import Iterable

import numpy as np
import zmq

from frontend.admission import Admitted
from frontend.metrics import RequestMetrics
from frontend.pump import Pump
from frontend.request import Choices, Failure, Listener, OpenRequest, Times
from frontend.scores import TokenScores
from frontend.tokenizer import ModelTokenizer
from protocol.messages import AbortRequests, AddRequest, Finished, FrontendReport, GetStats, Refused, Snapshot, TokenBatch, pack, unpack
from protocol.transport import Endpoint

STATS_SECONDS = 2.0
MAX_MESSAGES_PER_TURN = 64  # steps, when this process is that far behind; then clients have their turn


class Unavailable(Exception):
    """No request can be taken now; the text is for the client, as a 503."""


class EngineClient:
    """Submits admitted requests and hears of them.

    A listener is called from the event loop, once for all that arrived together for a choice, until its delta has the usage or it got
    a Failure. It must not call back. Invariant: `open` holds exactly the choices whose last word their listener has not heard.
    """

    def __init__(self, endpoint: Endpoint, tokenizer: ModelTokenizer | None, stream_interval: int = 1):
        self.endpoint = endpoint
        self.tokenizer = tokenizer
        self.stream_interval = stream_interval  # tokens
        self.open: dict[int, OpenRequest] = {}
        self.next_handle = 1
        self.next_snapshot: asyncio.Future[Snapshot] | None = None
        self.metrics = RequestMetrics()
        self.closing: Failure | None = None  # why no request is taken any more
        self.pump = Pump(endpoint.socket, self._receive)

    def submit(self, request: Admitted, listener: Listener, streams: bool = True, arrived: float | None = None) -> range:
        """Hand a request to the scheduler; without `streams` its listener hears of each choice once, when it ends.

        `arrived` is when the door got it, by the monotonic clock. Returns its choices' handles, for `abort`. Raises Unavailable.
        """
        if self.closing is not None:
            raise Unavailable(self.closing.message)
        now = time.monotonic()
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
            detokenizer = None if self.tokenizer is None else self.tokenizer.detokenizer(request.prompt_ids, request.skips_special)
            scores = TokenScores(request.num_logprobs, None if index else request.num_prompt_logprobs, request.prompt_ids)
            self.open[handle] = OpenRequest(
                choices, index, request.end_ids, detokenizer, request.stops, min_tokens, scores, streams, request.shows_stop,
                Times(now if arrived is None else arrived, now),
            )  # fmt: skip
        return handles

    def abort(self, handles: Iterable[int]) -> None:
        """End choices early; their listeners get a last delta, reason "abort". Unknown handles are harmless."""
        known = [handle for handle in handles if handle in self.open]
        for handle in known:
            self.metrics.end(self._close(handle, "abort"), time.monotonic())
        if known:
            self._send(AbortRequests(known))

    def end_all(self, failure: Failure) -> None:
        """Take no more requests, and end the open ones with this."""
        self.closing = failure
        for handle in list(self.open):
            self._fail(handle, failure)

    def send_report(self) -> None:
        """Let the scheduler have what was counted here, for the other frontends' metrics pages."""
        self._send(self.metrics.report())

    async def snapshot(self) -> Snapshot:
        """Of the scheduler; callers that wait at the same time share one. Raises TimeoutError with the text for a client."""
        if self.next_snapshot is None:
            self.next_snapshot = asyncio.get_running_loop().create_future()
            self._send(GetStats())
        try:
            return await asyncio.wait_for(asyncio.shield(self.next_snapshot), STATS_SECONDS)
        except TimeoutError:
            raise TimeoutError(f"the scheduler has not answered for {STATS_SECONDS} s") from None

    def _send(self, message: AddRequest | AbortRequests | GetStats | FrontendReport) -> None:
        try:
            self.endpoint.send(message)
        except zmq.Again:
            raise Unavailable("the scheduler is far behind") from None
        self.pump.poke()

    def _receive(self) -> None:
        """Take what has arrived, then tell each request's listener once."""
        touched: dict[int, OpenRequest] = {}
        finished: dict[int, Finished] = {}
        for message in itertools.islice(self.endpoint.drain(), MAX_MESSAGES_PER_TURN):
            match message:
                case TokenBatch():
                    self._take_tokens(message, touched)
                    finished.update((last.handle, last) for last in message.finished)
                case Refused(handle, code, text):
                    self._fail(handle, Failure(code, text))
                case Snapshot():
                    self._take_snapshot(message)
        now, ended = time.monotonic(), []
        for handle, last in finished.items():
            if handle in self.open:
                self.open[handle].times.num_preemptions = last.num_preemptions
                ended.append(self._close(handle, last.reason))
        ended += self._tell(request for handle, request in touched.items() if handle in self.open)
        for request in touched.values():  # clients first
            self.metrics.tokens(request, now)
        for request in ended:
            self.metrics.end(request, now)

    def _take_tokens(self, batch: TokenBatch, touched: dict[int, OpenRequest]) -> None:
        for started in batch.started:
            request = self.open.get(started.handle)
            if request is None:
                continue
            request.times.started = request.times.submitted + started.waited_s
            if request.index == 0:
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

    def _tell(self, touched: Iterable[OpenRequest]) -> list[OpenRequest]:
        """Hand on what is due; returns those that a stop string has ended, of which the scheduler knows nothing."""
        due = [request for request in touched if request.is_due(self.stream_interval)]
        stopped = [request for request in due if request.finish_reason is not None]
        for request in stopped:
            del self.open[request.handle]
        if stopped:
            self._send(AbortRequests([request.handle for request in stopped]))
        for request in due:
            request.choices.listener(request.take_delta())
        return stopped

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        if self.next_snapshot is not None:
            self.next_snapshot.set_result(snapshot)
            self.next_snapshot = None

    def _close(self, handle: int, reason: str) -> OpenRequest:
        request = self.open.pop(handle)
        request.finish(reason)
        request.choices.listener(request.take_delta())
        return request

    def _fail(self, handle: int, failure: Failure) -> None:
        """A refused choice ends its whole request."""
        request = self.open.get(handle)
        if request is None:
            return
        others = [other for other in request.choices.handles if self.open.pop(other, None) is not None and other != handle]
        if others:
            self._send(AbortRequests(others))
        request.choices.listener(failure)
