"""uvicorn inside the frontend's event loop."""

import asyncio
import logging
import socket
from contextlib import AbstractContextManager, nullcontext

import uvicorn
from starlette.applications import Starlette

MAX_CONNECTIONS = 2048
IDLE_SECONDS = 30  # a connection without a request
STOP_SECONDS = 2  # for open responses to hear of the end


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ValueError naming the address when it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=512)
    except OSError as error:
        raise ValueError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}") from None


class _Server(uvicorn.Server):
    """uvicorn's own would take the signals of the process."""

    def capture_signals(self) -> AbstractContextManager[None]:
        """Take none: the lifeline says when to stop."""
        return nullcontext()


class HttpServer:
    """Serves an application on a socket until `stop`."""

    def __init__(self, app: Starlette, listener: socket.socket):
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        config = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", access_log=False, log_config=None, server_header=False,
            limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=IDLE_SECONDS, timeout_graceful_shutdown=STOP_SECONDS,
        )  # fmt: skip
        self.server, self.listener = _Server(config), listener
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serve, in the running loop."""
        self.task = asyncio.get_running_loop().create_task(self.server.serve(sockets=[self.listener]))

    async def stop(self) -> None:
        """Take no more connections, let open ones end for a moment."""
        self.server.should_exit = True
        await self.task
