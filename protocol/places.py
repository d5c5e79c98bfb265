"""Folders and locks that belong to one engine: its private run directory, and the address of its door."""

import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

import msgspec

from protocol.address import default_client_address, other_doors
from protocol.config import EngineConfig
from protocol.lifeline import lock_path
from protocol.transport import check_ipc_address

HTTP_BACKLOG = 512  # connections that wait to be accepted


def make_private_dir(path: Path) -> Path:
    """A folder that only this user can enter. Raises ValueError when somebody else owns it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(f"{path} must belong to this user with mode 0700, found owner {found.st_uid}, mode {found.st_mode & 0o777:o}")
    return path


def lock_file(path: Path) -> int | None:
    """A descriptor that holds the file's lock until the last process with it ends; None when another holds it."""
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(fd).st_size:  # poetry.lock, say: ours are empty, and are removed at the end
            os.close(fd)
            raise ValueError(f"{path} is no lock file of this engine: choose another address")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if path.exists() and os.fstat(fd).st_ino == path.stat().st_ino:
            return fd
        os.close(fd)  # its last owner removed the file between our two calls


def lock_address(address: str) -> int:
    """Own a client address. Binding alone would take the socket of a live engine away from it, without an error."""
    client_socket = check_ipc_address(address)
    if address == default_client_address():
        make_private_dir(client_socket.parent)
    if not client_socket.parent.is_dir():
        raise ValueError(f"cannot listen on {address}: the folder does not exist")
    if client_socket.is_symlink() or (client_socket.exists() and not client_socket.is_socket()):
        raise ValueError(f"cannot listen on {address}: what lies there is no socket")
    fd = lock_file(lock_path(client_socket))
    if fd is None:
        raise ValueError(f"cannot listen on {address}: another engine serves it")
    for path in (client_socket, *other_doors(address)):
        path.unlink(missing_ok=True)
    return fd


def listen_http(config: EngineConfig) -> socket.socket | None:
    """The listening socket of the HTTP door; None where there is to be none. Raises ValueError naming the address it cannot have.

    Made before any process starts: a port in use is found at once, and several frontends accept from one socket.
    """
    if config.uds is not None:
        return _listen_unix(Path(config.uds))
    if config.port is None:
        return None
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=HTTP_BACKLOG)
    except OSError as error:
        raise ValueError(f"cannot listen on --host {config.host} --port {config.port}: {error.strerror or error}") from None


def _listen_unix(path: Path) -> socket.socket:
    if path.exists() and not path.is_socket():
        raise ValueError(f"cannot listen on --uds {path}: what lies there is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise ValueError(f"cannot listen on --uds {path}: a server answers there")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o077)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise ValueError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    listener.listen(HTTP_BACKLOG)
    return listener


def with_listener(config: EngineConfig, listener: socket.socket | None) -> EngineConfig:
    """The configuration with the HTTP socket's descriptor, and the port that it has got."""
    if listener is None:
        return config
    port = config.port if config.uds else listener.getsockname()[1]
    return msgspec.structs.replace(config, http_fd=listener.fileno(), port=port)


def make_run_dir() -> tuple[Path, int]:
    """A private directory for the internal sockets, and the lock that marks it as in use. Sweeps those of dead engines."""
    base = make_private_dir(check_ipc_address(default_client_address()).parent)
    for leftover in base.glob("run-*"):
        fd = lock_file(leftover / "lock") if leftover.is_dir() else None
        if fd is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(fd)
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=base))
    fd = lock_file(run_dir / "lock")
    assert fd is not None
    return run_dir, fd
