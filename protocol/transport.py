"""ZeroMQ sockets between our processes: private ipc addresses, typed frames, and a drain that never raises on bad input."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq

from protocol.messages import encode

log = logging.getLogger(__name__)

MAX_IPC_PATH = 107  # bytes in sockaddr_un, without the closing zero
MAX_MESSAGE_BYTES = 256 << 20  # a step of 2**20 prompt tokens takes 4 MiB, and its result 168 MiB where all are scored
# Messages waiting for one peer. Steps in flight bound the workers' channels; a frontend this far behind is broken.
HIGH_WATER_MARK = 100_000

DECODE_ERRORS = (msgspec.DecodeError, RecursionError, MemoryError)  # ValidationError is a DecodeError


class Endpoint:
    """A socket whose frames are messages of one channel.

    A frame that cannot be decoded is dropped, counted in `num_malformed` and logged: a peer's fault never ends this process.
    """

    def __init__(self, socket: zmq.Socket, decode: Callable[[bytes], object]):
        self.socket = socket
        self.decode = decode
        self.num_malformed = 0

    def send(self, message: object) -> None:
        """Send to the one peer. Raises zmq.Again when it is HIGH_WATER_MARK messages behind."""
        self.socket.send(encode(message), zmq.NOBLOCK)

    def receive(self) -> object:
        """Block for the next well-formed message."""
        while True:
            message = self._decoded([self.socket.recv()])
            if message is not None:
                return message

    def drain(self) -> Iterator[object]:
        """Every message that has arrived."""
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # half of what the exception takes that a try would end with
            message = self._decoded(self.socket.recv_multipart(zmq.NOBLOCK))
            if message is not None:
                yield message

    def _decoded(self, frames: list[bytes]) -> object | None:
        try:
            (payload,) = frames
            return self.decode(payload)
        except (ValueError, *DECODE_ERRORS) as error:
            self.num_malformed += 1
            log.warning("dropped a malformed frame: %s", error)
            return None


class RoutedEndpoint(Endpoint):
    """The bound side of a channel with several peers, told apart by their identities."""

    def send_to(self, identity: bytes, message: object) -> None:
        """Send to one peer. Raises zmq.ZMQError when it is unknown or too far behind."""
        self.socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)

    def send_to_all(self, identities: list[bytes], message: object) -> None:
        """Send the same bytes to several peers; encoded once."""
        payload = encode(message)
        for identity in identities:
            self.socket.send_multipart([identity, payload], zmq.NOBLOCK)

    def _decoded(self, frames: list[bytes]) -> tuple[bytes, object] | None:
        message = super()._decoded(frames[1:])
        return None if message is None else (frames[0], message)


def open_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    """A socket with the limits of our internal channels."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    if kind == zmq.ROUTER:
        socket.router_mandatory = 1  # without it, a message for an unknown peer vanishes
    return socket


def bind(socket: zmq.Socket, address: str) -> None:
    """Bind an ipc address so that only this user can connect. Raises ValueError on an address that cannot be bound."""
    check_ipc_address(address)
    before = os.umask(0o077)  # the socket file's mode follows it
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot listen on {address}: {error}") from None
    finally:
        os.umask(before)


def check_ipc_address(address: str) -> Path:
    """The socket file of an ipc address. Raises ValueError for other transports and for paths that the kernel refuses."""
    if not address.startswith("ipc://") or len(address) == len("ipc://"):
        raise ValueError(f"the address must be ipc://PATH, got {address!r} (tcp needs CURVE keys, which are not supported yet)")
    path = address.removeprefix("ipc://")
    if path.startswith("@"):
        raise ValueError(f"the address must name a file, got {address!r}: abstract sockets are open to every user")
    if not path.isprintable():
        raise ValueError(f"the address must be printable text, got {address!r}")
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ValueError(f"the socket path must have at most {MAX_IPC_PATH} bytes, got {len(os.fsencode(path))}: {path}")
    return Path(path)


def check_handshake(version: int, epoch: int, expected_version: int, expected_epoch: int, peer: str) -> None:
    """Raise ValueError when a peer speaks another protocol or belongs to another start of the engine."""
    if version != expected_version:
        raise ValueError(f"{peer} speaks protocol version {version}, this process {expected_version}")
    if epoch != expected_epoch:
        raise ValueError(f"{peer} belongs to epoch {epoch}, this process to {expected_epoch}")
