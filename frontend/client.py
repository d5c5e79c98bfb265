"""Clients of the ZMQ API: `Client` blocks, `AsyncClient` is for asyncio. Needs pyzmq, msgspec and numpy only.

    with Client() as client:
        for output in client.generate("Once upon a time", max_tokens=32):
            print(output.text, end="")

Keyword arguments that are not named below are sampling parameters: the fields of protocol.sampling.SamplingParams.
From a shell: python -m frontend.client --help
"""

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, closing
from math import inf

import zmq
import zmq.asyncio

from frontend.client_cli import run
from frontend.client_stream import (
    Choice,
    Completion,
    EngineError,
    Messages,
    ReplyCheck,
    build_request,
    check_one_turn,
    encode_request,
    is_last,
    join_outputs,
)
from protocol.address import DOOR_VERSION, default_client_address, pick_door
from protocol.messages import Cancel, Error, GetInfo, Info, KeepAlive, Output, decode_to_client
from protocol.transport import DECODE_ERRORS

__all__ = ["AsyncClient", "Choice", "Client", "Completion", "EngineError"]

CONNECT_SECONDS = 5.0  # for the engine's first sign of life
SILENCE_SECONDS = 10.0  # while a request is open the engine sends a keep-alive every half second; this long without: it is gone
LINGER_MS = 200  # at closing, for a last Cancel to leave


class Client:
    """One connection, for one thread; several of its generators may be open at once.

    `timeout` bounds, in seconds, the wait for each reply, keep-alives not counted; None waits as long as the engine shows signs of
    life. Every call raises EngineError, and ValueError for an argument that cannot be sent.
    """

    def __init__(self, address: str | None = None, timeout: float | None = None, connect_timeout: float = CONNECT_SECONDS):
        self.address = address or default_client_address()
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.context = zmq.Context()
        self.socket = _open_socket(self.context, pick_door(self.address))
        self.request_ids = itertools.count()
        self.replies: dict[int, deque[Output | Error]] = {}  # of open requests, not yet read by their generators
        self.infos: deque[Info | Error] = deque()
        self.connected = False

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection; the engine ends what is open."""
        self.context.destroy(linger=LINGER_MS)

    def info(self) -> Info:
        """What is served, and how it is doing."""
        deadline = _deadline(self.timeout if self.connected else self.connect_timeout)
        self._send(GetInfo())
        while not self.infos:
            self._receive(deadline)
        reply = self.infos.popleft()
        if isinstance(reply, Error):
            raise EngineError(reply.code, reply.message)
        return reply

    def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_ids: list[int] | None = None,
        messages: Messages | None = None,
        stream: bool = True,
        cache_salt: str | None = None,
        priority: int = 0,
        **sampling: object,
    ) -> Generator[Output]:
        """Outputs as they come, the last with the usage; `index` is the choice. Closing the generator early cancels the request."""
        self._connect()
        request_id = next(self.request_ids)
        replies = self.replies[request_id] = deque()
        check, finished = ReplyCheck(), False
        try:
            self._send(build_request(request_id, prompt, prompt_ids, messages, stream, cache_salt, priority, sampling))
            while not finished:
                deadline = _deadline(self.timeout)
                while not replies:
                    self._receive(deadline)
                reply = replies.popleft()
                finished = is_last(reply)
                yield check.check(reply)
        finally:
            del self.replies[request_id]
            if not finished and not self.socket.closed:  # a generator may outlive its client
                self._send(Cancel(request_id))

    def complete(self, prompt: str | None = None, **request: object) -> Completion:
        """The whole answer at once; arguments as for `generate`."""
        return join_outputs(list(self.generate(prompt, stream=False, **request)))

    def chat(self, messages: Messages, **sampling: object) -> Iterator[str]:
        """The text of the assistant's next turn, as it comes."""
        check_one_turn(sampling)
        with closing(self.generate(messages=messages, **sampling)) as outputs:
            for output in outputs:
                yield output.text

    def _connect(self) -> None:
        if not self.connected:
            self.info()

    def _send(self, message: object) -> None:
        try:
            self.socket.send_multipart([DOOR_VERSION, encode_request(message)], zmq.NOBLOCK)
        except zmq.Again:
            raise _no_answer(self.address) from None

    def _receive(self, deadline: float | None) -> None:
        """Take one message, whichever request it is for."""
        most = SILENCE_SECONDS if self.connected else inf  # an engine that is still loading says nothing
        rest = most if deadline is None else min(most, max(0, deadline - time.monotonic()))
        if not self.socket.poll(None if rest == inf else rest * 1000):
            raise _no_answer(self.address)
        message = _decode(self.socket.recv_multipart())
        self.connected = True
        match message:
            case Output() | Error(request_id=int()):
                if message.request_id in self.replies:  # else its generator was closed
                    self.replies[message.request_id].append(message)
            case Info() | Error():
                self.infos.append(message)


class AsyncClient:
    """One connection, for one event loop, with any number of requests at once; nobody waits for another's reading.

    To be used as `async with AsyncClient() as client`. Timeouts and errors as for `Client`.
    """

    def __init__(self, address: str | None = None, timeout: float | None = None, connect_timeout: float = CONNECT_SECONDS):
        self.address = address or default_client_address()
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.request_ids = itertools.count()
        self.replies: dict[int, asyncio.Queue[Output | Error]] = {}
        self.infos: deque[asyncio.Future[Info | Error]] = deque()

    async def __aenter__(self) -> "AsyncClient":
        self.context = zmq.asyncio.Context()
        self.socket = _open_socket(self.context, pick_door(self.address))
        self.last_heard = inf  # an engine that is still loading says nothing
        self.tasks = [asyncio.create_task(work) for work in (self._read(), self._watch())]
        try:
            await self._info(self.connect_timeout)
        except EngineError:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the connection; the engine ends what is open."""
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        self.context.destroy(linger=LINGER_MS)

    async def info(self) -> Info:
        """What is served, and how it is doing."""
        return await self._info(self.timeout)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_ids: list[int] | None = None,
        messages: Messages | None = None,
        stream: bool = True,
        cache_salt: str | None = None,
        priority: int = 0,
        **sampling: object,
    ) -> AsyncGenerator[Output]:
        """Outputs as they come, the last with the usage; `index` is the choice. Closing early (`aclosing`) cancels the request."""
        self._expect()
        request_id = next(self.request_ids)
        replies = self.replies[request_id] = asyncio.Queue()
        check, finished = ReplyCheck(), False
        try:
            await self._send(build_request(request_id, prompt, prompt_ids, messages, stream, cache_salt, priority, sampling))
            while not finished:
                reply = await self._within(self.timeout, replies.get())
                finished = is_last(reply)
                yield check.check(reply)
        finally:
            del self.replies[request_id]
            if not finished and not self.socket.closed:
                await self._send(Cancel(request_id))

    async def complete(self, prompt: str | None = None, **request: object) -> Completion:
        """The whole answer at once; arguments as for `generate`."""
        async with aclosing(self.generate(prompt, stream=False, **request)) as outputs:
            return join_outputs([output async for output in outputs])

    async def chat(self, messages: Messages, **sampling: object) -> AsyncIterator[str]:
        """The text of the assistant's next turn, as it comes."""
        check_one_turn(sampling)
        async with aclosing(self.generate(messages=messages, **sampling)) as outputs:
            async for output in outputs:
                yield output.text

    async def _info(self, timeout: float | None) -> Info:
        self._expect()
        future = asyncio.get_running_loop().create_future()
        self.infos.append(future)
        await self._send(GetInfo())
        reply = await self._within(timeout, future)
        if isinstance(reply, Error):
            raise EngineError(reply.code, reply.message)
        return reply

    async def _within(self, timeout: float | None, reply):
        try:
            return await asyncio.wait_for(reply, timeout)
        except TimeoutError:
            raise _no_answer(self.address) from None

    def _expect(self) -> None:
        if not self.replies and not self.infos and self.last_heard < inf:
            self.last_heard = time.monotonic()  # nothing was due before

    async def _send(self, message: object) -> None:
        await self.socket.send_multipart([DOOR_VERSION, encode_request(message)])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1)
            if time.monotonic() - self.last_heard > SILENCE_SECONDS:
                self._fail_all(_no_answer(self.address))

    def _fail_all(self, error: EngineError) -> None:
        for request_id, replies in self.replies.items():
            replies.put_nowait(Error(request_id, error.code, error.message))
        while self.infos:
            self._take_info(Error(None, error.code, error.message))

    async def _read(self) -> None:
        while True:
            frames = await self.socket.recv_multipart()
            self.last_heard = time.monotonic()
            try:
                message = _decode(frames)
            except EngineError as error:
                self._fail_all(error)
                continue
            match message:
                case Output() | Error(request_id=int()):
                    if message.request_id in self.replies:  # else its generator was closed
                        self.replies[message.request_id].put_nowait(message)
                case Info() | Error():
                    self._take_info(message)

    def _take_info(self, reply: Info | Error) -> None:
        if self.infos:
            future = self.infos.popleft()
            if not future.done():  # else its caller gave up waiting
                future.set_result(reply)


def _open_socket(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0  # the door bounds what it sends; what we send is bounded by our own requests
    socket.connect(address)
    return socket


def _decode(frames: list[bytes]) -> Output | Error | KeepAlive | Info:
    if len(frames) != 2 or frames[0] != DOOR_VERSION:
        raise EngineError(500, f"the engine speaks another protocol version than {DOOR_VERSION!r}")
    try:
        return decode_to_client(frames[1])
    except DECODE_ERRORS as error:
        raise EngineError(500, f"the engine sent a malformed message: {error}") from None


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _no_answer(address: str) -> EngineError:
    return EngineError(504, f"no answer from the engine at {address}")


if __name__ == "__main__":
    sys.exit(run(Client))
