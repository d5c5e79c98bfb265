"""Messages to clients, without ever waiting for one of them."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from errno import EHOSTUNREACH

import zmq

from protocol.address import DOOR_VERSION
from protocol.messages import ClientMessage, encode

log = logging.getLogger(__name__)

MAX_BACKLOG = 256  # messages kept for a client that does not read; one more and its requests are ended
MAX_LAST_WORDS = 16_384  # with the errors that tell it so; beyond, it hears nothing
RETRY_SECONDS = 0.01


class Outbox:
    """Sends to the clients of a ROUTER socket, keeping a bounded backlog for each one whose queue is full.

    `on_gone` and `on_slow` are called with the client's identity from the event loop, never from within `send`.
    """

    def __init__(
        self,
        socket: zmq.Socket,
        poke: Callable[[], None],
        on_gone: Callable[[bytes], None],
        on_slow: Callable[[bytes], None],
    ):
        self.socket = socket
        self.poke = poke
        self.on_gone = on_gone
        self.on_slow = on_slow
        self.backlogs: dict[bytes, deque[bytes]] = {}
        self.num_dropped = 0

    def send(self, identity: bytes, message: ClientMessage) -> None:
        """Send now, or as soon as the client reads."""
        payload = encode(message)
        backlog = self.backlogs.get(identity)
        if backlog is not None:
            self._put_back(identity, backlog, payload)
        elif not self._try_send(identity, payload):
            self.backlogs[identity] = deque([payload])
            if len(self.backlogs) == 1:
                self._retry_later()

    def has_backlog(self, identity: bytes) -> bool:
        """Whether the client has yet to read what was sent before."""
        return identity in self.backlogs

    def retry(self) -> None:
        """Send of every backlog as much as its client takes."""
        for identity, backlog in list(self.backlogs.items()):
            while backlog and self._try_send(identity, backlog[0]):
                backlog.popleft()
            if not backlog:
                del self.backlogs[identity]

    def _put_back(self, identity: bytes, backlog: deque[bytes], payload: bytes) -> None:
        if len(backlog) >= MAX_LAST_WORDS:
            self.num_dropped += 1
            return
        backlog.append(payload)
        if len(backlog) > MAX_BACKLOG:
            asyncio.get_running_loop().call_soon(self.on_slow, identity)

    def _try_send(self, identity: bytes, payload: bytes) -> bool:
        """False when the client's queue is full. What goes to a client that is gone counts as sent."""
        self.poke()
        try:
            self.socket.send_multipart([identity, DOOR_VERSION, payload], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != EHOSTUNREACH:
                raise
            asyncio.get_running_loop().call_soon(self.on_gone, identity)
        return True

    def _retry_later(self) -> None:
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._retry_and_go_on)

    def _retry_and_go_on(self) -> None:
        self.retry()
        if self.backlogs:
            self._retry_later()
