"""Messages to clients, without ever waiting for one of them."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from errno import EHOSTUNREACH

import zmq

from protocol.address import DOOR_VERSION
from protocol.messages import ClientMessage, encode

# Messages kept for one client beyond the socket's own queue. A step of 2,000 streams is as many messages, so a client is not slow
# for being behind, but for being behind and taking nothing.
MAX_BACKLOG = 256
SLOW_SECONDS = 1.0
MAX_BURST = 8192  # slow at once
MAX_LAST_WORDS = 65_536  # with the errors that end its requests; beyond, it hears nothing
RETRY_SECONDS = (0.002, 0.25)  # the wait doubles while nobody takes anything


@dataclass(eq=False)
class _Backlog:
    payloads: deque[bytes]
    taken_at: float  # monotonic seconds when the client last took something


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
        self.backlogs: dict[bytes, _Backlog] = {}
        self.num_dropped = 0

    def send(self, identity: bytes, message: ClientMessage) -> None:
        """Send now, or as soon as the client reads."""
        payload = encode(message)
        backlog = self.backlogs.get(identity)
        if backlog is not None:
            self._keep(identity, backlog, payload)
        elif not self._try_send(identity, payload):
            self.backlogs[identity] = _Backlog(deque([payload]), time.monotonic())
            if len(self.backlogs) == 1:
                self._retry_later(RETRY_SECONDS[0])

    def has_backlog(self, identity: bytes) -> bool:
        """Whether the client has yet to read what was sent before."""
        return identity in self.backlogs

    def retry(self) -> bool:
        """Send of every backlog as much as its client takes; whether any took something."""
        now = time.monotonic()
        for identity, backlog in list(self.backlogs.items()):
            while backlog.payloads and self._try_send(identity, backlog.payloads[0]):
                backlog.payloads.popleft()
                backlog.taken_at = now
            if not backlog.payloads:
                del self.backlogs[identity]
            elif len(backlog.payloads) > MAX_BACKLOG and now - backlog.taken_at > SLOW_SECONDS:
                self.on_slow(identity)
        return any(backlog.taken_at == now for backlog in self.backlogs.values())

    def _keep(self, identity: bytes, backlog: _Backlog, payload: bytes) -> None:
        if len(backlog.payloads) >= MAX_LAST_WORDS:
            self.num_dropped += 1
            return
        backlog.payloads.append(payload)
        if len(backlog.payloads) == MAX_BURST:
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

    def _retry_later(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._retry_until_sent, seconds)

    def _retry_until_sent(self, seconds: float) -> None:
        taken = self.retry()
        if self.backlogs:
            self._retry_later(RETRY_SECONDS[0] if taken else min(2 * seconds, RETRY_SECONDS[1]))
