"""uvicorn inside the frontend's event loop, with the limits that it lacks."""

import asyncio
import logging
import socket
from contextlib import AbstractContextManager, nullcontext

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from frontend.metrics import RequestMetrics

MAX_CONNECTIONS = 4096
IDLE_SECONDS = 30  # a connection between two requests
HALF_SENT_SECONDS = 15.0  # for the head of a request, and for each pause in its body
UNREAD_SECONDS = 60.0  # for a client that takes nothing of its answer
STOP_SECONDS = 2  # for open responses to hear of the end


class _Server(uvicorn.Server):
    """uvicorn's own would take the signals of the process."""

    def capture_signals(self) -> AbstractContextManager[None]:
        """Take none: the lifeline says when to stop."""
        return nullcontext()


class BoundedProtocol(H11Protocol):
    """A connection that is cut when its client stops in the middle: of a request's head or body, or of reading an answer.

    uvicorn bounds the time between two requests only.
    """

    counts: RequestMetrics
    half_sent: asyncio.TimerHandle | None = None
    unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The first request's head is due."""
        super().connection_made(transport)
        self.half_sent = self.loop.call_later(HALF_SENT_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """More of a request: of a body, the next part is due anew; of a head, the rest is still due when it was."""
        super().data_received(data)
        state = self.conn.their_state
        is_half_sent_head = state is h11.IDLE and bool(self.conn.trailing_data[0])
        if is_half_sent_head and self.half_sent is not None:
            return
        self.half_sent = _cancelled(self.half_sent)
        if (is_half_sent_head or state is h11.SEND_BODY) and not self.transport.is_closing():
            self.half_sent = self.loop.call_later(HALF_SENT_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        """The client does not keep up: it has so long to take something."""
        super().pause_writing()
        self.unread = self.unread or self.loop.call_later(UNREAD_SECONDS, self._cut_slow_reader)

    def resume_writing(self) -> None:
        """It has."""
        super().resume_writing()
        self.unread = _cancelled(self.unread)

    def _cut_slow_reader(self) -> None:
        self.counts.num_slow_readers += 1
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        self.half_sent, self.unread = _cancelled(self.half_sent), _cancelled(self.unread)
        super().connection_lost(exc)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class HttpServer:
    """Serves an application on a socket until `stop`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, metrics: RequestMetrics):
        class Protocol(BoundedProtocol):
            counts = metrics

        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        config = uvicorn.Config(
            app, http=Protocol, ws="none", lifespan="off", access_log=False, log_config=None, server_header=False, proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=IDLE_SECONDS, timeout_graceful_shutdown=STOP_SECONDS,
        )  # fmt: skip
        self.server, self.listener = _Server(config), listener
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serve, in the running loop. A server that ends by itself is a fault, for the loop's exception handler."""
        self.task = asyncio.get_running_loop().create_task(self.server.serve(sockets=[self.listener]))
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self.server.should_exit:
            raise task.exception() or RuntimeError("the HTTP server has ended")

    async def stop(self) -> None:
        """Take no more connections, let open ones end for a moment."""
        self.server.should_exit = True
        await self.task
