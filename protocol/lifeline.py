"""The socket pair between the supervisor and each child.

The child writes Ready or Failed; the end of the stream means, to the child, that the supervisor asks it to stop or is gone, and
to the supervisor, that the child is gone. One mechanism serves the clean stop and `kill -9` alike.
"""

import ctypes
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from protocol.address import other_doors
from protocol.config import EngineConfig, load_config
from protocol.transport import check_ipc_address

PR_SET_PDEATHSIG = 1
PEER_GONE_S = 5.0
DRAIN, FAULT = b"d", b"f"  # from the supervisor to a frontend, before the end of the stream


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child serves; `note` goes into the supervisor's log."""

    note: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child ends; `reason` is one line for the user."""

    reason: str
    exit_code: int


decode_line = msgspec.json.Decoder(Ready | Failed).decode


class Lifeline:
    """The child's end. Readable (`fileno`) once the child is to stop."""

    def __init__(self, fd: int):
        self.socket = socket.socket(fileno=fd)

    def fileno(self) -> int:
        """For pollers and event loops."""
        return self.socket.fileno()

    def is_cut(self, within_s: float = 0.0) -> bool:
        """Whether the child is to stop, now or within some seconds."""
        return bool(select.select([self.socket], [], [], within_s)[0])

    def order(self) -> bytes:
        """When this is readable: DRAIN, to end once the work is done; FAULT, to end since another process has failed; or b"", to end."""
        with suppress(ConnectionResetError):
            return self.socket.recv(1)
        return b""

    def wait_cut(self) -> None:
        """Block until the child is to stop."""
        with suppress(ConnectionResetError):  # the supervisor is gone, and has not read what was sent to it
            self.socket.recv(1)

    def send(self, message: Ready | Failed) -> None:
        """Tell the supervisor; silent when it is gone."""
        try:
            self.socket.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            pass


def run_child(main: Callable[[EngineConfig, Lifeline, int], None]) -> None:
    """Entry of a child process: `python -m PACKAGE.main CONFIG_FILE LIFELINE_FD INDEX`, its index among those of its role.

    A ValueError or OSError is the user's to mend and becomes one line and exit code 2; anything else shows its traceback too and
    ends with 1.
    """
    role = sys.modules["__main__"].__spec__.parent
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {role}: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor's to handle
    lifeline = Lifeline(int(sys.argv[2]))
    try:
        main(load_config(sys.argv[1]), lifeline, int(sys.argv[3]))
    except Exception as error:
        # A peer that is gone has its own reason, which the supervisor learns and tells; it stops this process next.
        is_peer_gone = isinstance(error, zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH
        if lifeline.is_cut(within_s=PEER_GONE_S if is_peer_gone else 0.0):
            sys.exit(0)  # the engine is stopping, and another process has removed the run directory already
        is_users_fault = isinstance(error, ValueError | OSError)
        if not is_users_fault:
            traceback.print_exc()
        reason = " ".join(str(error).split())
        lifeline.send(Failed(reason if is_users_fault else f"{type(error).__name__}: {reason}", 2 if is_users_fault else 1))
        sys.exit(2 if is_users_fault else 1)


def die_with_supervisor() -> None:
    """Have the kernel kill this process when its parent dies, even inside a long library call."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_when_cut(lifeline: Lifeline) -> None:
    """Start a thread that ends this process at once when the lifeline is cut: for a process with nothing to hand over."""

    def watch() -> None:
        lifeline.wait_cut()
        os._exit(0)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def remove_leftovers(config: EngineConfig) -> None:
    """Remove the run directory and the client socket; whoever ends last does it, in any order and any number of times."""
    shutil.rmtree(config.run_dir, ignore_errors=True)
    client_socket = check_ipc_address(config.client_address)
    http_socket = [Path(config.uds)] if config.uds else []
    for path in (client_socket, lock_path(client_socket), *other_doors(config.client_address), *http_socket):
        path.unlink(missing_ok=True)


def lock_path(client_socket: Path) -> Path:
    """The file whose lock says that an engine serves this address."""
    return client_socket.with_name(client_socket.name + ".lock")
