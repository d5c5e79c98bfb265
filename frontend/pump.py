"""Reading a ZeroMQ socket from an event loop."""

import asyncio
from collections.abc import Callable

import zmq


class Pump:
    """Calls `receive` while the socket holds messages; it may take some of them only, so that others have their turn.

    Like zmq.asyncio, without a future per message. The socket's descriptor wakes the loop on a change only, and a send may take
    that wake-up away, so whoever sends calls `poke`.
    """

    def __init__(self, socket: zmq.Socket, receive: Callable[[], None]):
        self.socket = socket
        self.receive = receive
        self.loop: asyncio.AbstractEventLoop | None = None
        self.poked = False

    def start(self) -> None:
        """Begin to receive, in the running loop."""
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.socket.fd, self._check)
        self.poke()

    def stop(self) -> None:
        """Receive no more; before the socket is closed."""
        self.loop.remove_reader(self.socket.fd)
        self.loop = None

    def poke(self) -> None:
        """Look for messages soon."""
        if not self.poked and self.loop is not None:
            self.poked = True
            self.loop.call_soon(self._check)

    def _check(self) -> None:
        self.poked = False
        if self.loop is not None and self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self.receive()
            self.poke()
