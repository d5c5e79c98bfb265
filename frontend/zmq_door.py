"""The ZMQ API: client messages in, outputs back, over one ROUTER socket."""

import asyncio
import functools
import logging
import time
from dataclasses import dataclass, field

import msgspec
import zmq

from frontend.admission import Admission
from frontend.engine import EngineClient, Unavailable
from frontend.outbox import Outbox
from frontend.pump import Pump
from frontend.request import Delta, Failure
from protocol.address import DOOR_VERSION, MAX_DOOR_BYTES
from protocol.messages import Cancel, Error, Generate, GetInfo, Info, KeepAlive, Output, Usage, decode_from_client
from protocol.transport import DECODE_ERRORS

log = logging.getLogger(__name__)

CLIENT_HIGH_WATER_MARK = 1000  # messages queued in the socket for one client, each way
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 6000
HANDSHAKE_MS = 2000
KEEP_ALIVE_SECONDS = 0.4  # a client that left without a word is noticed at the next send
MAX_MESSAGES_PER_TURN = 64  # then outputs have their turn
MAX_TOKENIZING = 1024  # texts waiting for the tokenizer; each may be as long as a frame


def open_door(context: zmq.Context) -> zmq.Socket:
    """The ROUTER socket with the limits that strangers are held to; to be bound by `protocol.transport.bind`."""
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.router_mandatory = 1  # a send to a client that left raises
    socket.sndhwm = socket.rcvhwm = CLIENT_HIGH_WATER_MARK
    socket.maxmsgsize = MAX_DOOR_BYTES
    socket.handshake_ivl = HANDSHAKE_MS
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = socket.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS
    socket.ipv6 = 0
    socket.backlog = 512
    return socket


@dataclass(eq=False)
class ClientRequest:
    """A request of one client, until its last message."""

    identity: bytes
    request_id: int
    handles: range = range(0)  # of its choices; none while its text is being tokenised
    tokenizing: asyncio.Task[None] | None = None
    seq: int = 0
    verdict: Error | None = None  # its last message, when the door ends it
    arrived: float = field(default_factory=time.monotonic)


class ZmqDoor:
    """Serves the clients of the ROUTER socket.

    Invariant: `clients` holds, per identity, exactly its requests without a last message.
    """

    def __init__(self, socket: zmq.Socket, engine: EngineClient, admission: Admission, model_name: str):
        self.engine = engine
        self.admission = admission
        self.model_name = model_name
        self.socket = socket
        self.pump = Pump(socket, self._receive)
        self.outbox = Outbox(socket, self.pump.poke, self._client_gone, self._client_slow)
        self.clients: dict[bytes, dict[int, ClientRequest]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.num_tokenizing = 0
        self.num_refused = 0

    def start(self) -> None:
        """Serve, in the running loop."""
        self.pump.start()
        self._keep_alive()

    def close(self, failure: Failure) -> None:
        """Take no more messages and end every open request with this."""
        self.pump.stop()
        for task in self.tasks:
            task.cancel()
        for request in self._open_requests():
            self._end(request, Error(request.request_id, failure.code, failure.message))

    # ---- messages in ----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            if not self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                return
            self._take_frames(self.socket.recv_multipart(zmq.NOBLOCK))

    def _take_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] != DOOR_VERSION:
            self._malformed(frames[0], None, f"a message is two frames, the first {DOOR_VERSION!r}")
            return
        identity, _version, payload = frames
        try:
            message = decode_from_client(payload)
        except DECODE_ERRORS as error:
            self._malformed(identity, _find_request_id(payload), str(error))
            return
        match message:
            case Generate():
                self._generate(identity, message)
            case Cancel():
                self._cancel(identity, message.request_id)
            case GetInfo():
                self._start(self._answer_info(identity))

    def _malformed(self, identity: bytes, request_id: int | None, reason: str) -> None:
        metrics = self.engine.metrics
        metrics.num_malformed += 1
        if metrics.num_malformed.bit_count() == 1:  # the 1st, 2nd, 4th, …: a flood must not fill the disk
            log.warning("malformed client message (%d so far): %s", metrics.num_malformed, reason)
        self.outbox.send(identity, Error(request_id, 400, reason))

    def _generate(self, identity: bytes, message: Generate) -> None:
        requests = self.clients.setdefault(identity, {})
        if message.request_id in requests:
            self.num_refused += 1
            self.outbox.send(identity, Error(message.request_id, 409, f"request_id {message.request_id} is in use"))
            return
        request = requests[message.request_id] = ClientRequest(identity, message.request_id)
        try:
            if not self.admission.needs_text(message):
                self._submit(request, message, message.prompt_ids)
            elif self.num_tokenizing < MAX_TOKENIZING:
                request.tokenizing = self._start(self._tokenize_and_submit(request, message))
            else:
                self._refuse(request, 503, f"{MAX_TOKENIZING} texts are waiting for the tokenizer")
        except ValueError as error:
            self._refuse(request, 400, str(error))

    async def _tokenize_and_submit(self, request: ClientRequest, message: Generate) -> None:
        self.num_tokenizing += 1
        try:
            prompt_ids = await self.admission.prompt_ids_of_text(message)
            self._submit(request, message, prompt_ids)
        except ValueError as error:
            self._refuse(request, 400, str(error))
        finally:
            self.num_tokenizing -= 1

    def _submit(self, request: ClientRequest, message: Generate, prompt_ids: list[int]) -> None:
        admitted = self.admission.admit(prompt_ids, message.sampling, message.cache_salt, message.priority)
        try:
            request.handles = self.engine.submit(admitted, functools.partial(self._on_news, request), message.stream, request.arrived)
        except Unavailable as error:
            self._refuse(request, 503, str(error))

    def _refuse(self, request: ClientRequest, code: int, reason: str) -> None:
        self.num_refused += 1
        self.engine.metrics.rejected["invalid" if code == 400 else "unavailable"] += 1
        self._end(request, Error(request.request_id, code, reason))

    def _cancel(self, identity: bytes, request_id: int) -> None:
        request = self.clients.get(identity, {}).get(request_id)
        if request is not None:
            self._abort([request])

    async def _answer_info(self, identity: bytes) -> None:
        limits = self.admission.limits
        try:
            stats = msgspec.structs.asdict((await self.engine.snapshot()).stats)
        except TimeoutError as error:
            self.outbox.send(identity, Error(None, 503, str(error)))
            return
        stats["open_requests"] = sum(map(len, self.clients.values()))
        stats["num_malformed_client"] = self.engine.metrics.num_malformed
        stats["num_refused_client"] = self.num_refused
        stats["num_dropped_client"] = self.outbox.num_dropped
        self.outbox.send(identity, Info(self.model_name, limits.max_model_len, limits.vocab_size, stats))

    # ---- messages out ---------------------------------------------------------------------------------------------

    def _on_news(self, request: ClientRequest, news: Delta | Failure) -> None:
        if isinstance(news, Failure):
            self._end(request, Error(request.request_id, news.code, news.message))
            return
        output = _output(request, news)
        request.seq += 1
        if news.usage is not None:
            self._end(request, request.verdict or output)
        elif request.verdict is None:
            self.outbox.send(request.identity, output)

    def _end(self, request: ClientRequest, last: Output | Error) -> None:
        requests = self.clients[request.identity]
        del requests[request.request_id]
        if not requests:
            del self.clients[request.identity]
        self.outbox.send(request.identity, last)

    def _keep_alive(self) -> None:
        for identity in list(self.clients):
            if not self.outbox.has_backlog(identity):
                self.outbox.send(identity, KeepAlive())
        asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self._keep_alive)

    # ---- requests ended early -------------------------------------------------------------------------------------

    def _abort(self, requests: list[ClientRequest]) -> None:
        for request in requests:
            if not request.handles:
                request.tokenizing.cancel()
                self._end(request, request.verdict or Output(request.request_id, 0, "", [], "abort", Usage(0, 0)))
        self.engine.abort([handle for request in requests for handle in request.handles])

    def _client_gone(self, identity: bytes) -> None:
        requests = list(self.clients.get(identity, {}).values())
        if requests:
            log.info("a client left; %d requests end", len(requests))
            self._abort(requests)

    def _client_slow(self, identity: bytes) -> None:
        requests = list(self.clients.get(identity, {}).values())
        if requests:
            log.warning("a client does not read; %d requests end", len(requests))
            self.engine.metrics.num_slow_readers += 1
            for request in requests:
                request.verdict = Error(request.request_id, 503, "this client does not read its outputs")
            self._abort(requests)

    def _open_requests(self) -> list[ClientRequest]:
        return [request for requests in self.clients.values() for request in requests.values()]

    def _start(self, work) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)  # the loop itself keeps a weak reference only
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.result()  # raises what nobody foresaw, for the loop's exception handler


def _output(request: ClientRequest, delta: Delta) -> Output:
    return Output(
        request_id=request.request_id,
        seq=request.seq,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason,
        usage=delta.usage,
        index=delta.index,
        logprobs=None if delta.scores is None else delta.scores.read(),
        prompt_logprobs=None if delta.prompt_scores is None else delta.prompt_scores.read_prompt(),
    )


def _find_request_id(payload: bytes) -> int | None:
    """The request_id of a message that is not well-formed otherwise."""
    try:
        content = msgspec.msgpack.decode(payload)
    except DECODE_ERRORS:
        return None
    request_id = content.get("request_id") if isinstance(content, dict) else None
    return request_id if type(request_id) is int else None
