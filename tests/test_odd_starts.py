"""Arguments and surroundings that nobody planned for: the engine serves, or says in one line why not, and harms no file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import launch
from frontend.client import Client, EngineError
from protocol.address import default_client_address
from protocol.config import EngineConfig
from protocol.transport import MAX_IPC_PATH
from tests.engine_process import ROOT, EngineProcess
from worker.checksum import ChecksumModel
from worker.memory import num_kv_blocks

CHECKSUM = ("--executor", "checksum", "--num-threads", "1")


def config(*arguments: str, **environment: str) -> EngineConfig:
    return launch.make_config(launch.parse_arguments(list(arguments)), environment)


@pytest.mark.parametrize("make", [
    lambda path: path.write_text("precious"),
    lambda path: path.mkdir(),
    lambda path: path.symlink_to("/etc/hosts"),
    lambda path: os.mkfifo(path),
    lambda path: path.with_name(path.name + ".lock").write_text("precious"),
    lambda path: path.with_name(path.name + ".lock").symlink_to("/etc/hosts"),
])  # fmt: skip
def test_an_address_never_costs_a_file_that_lies_there(make, tmp_path):
    path = tmp_path / "poetry"
    make(path)
    before = {file: file.lstat() for file in tmp_path.iterdir()}
    with pytest.raises((ValueError, OSError), match="no socket|no lock file|symbolic links"):
        launch.lock_address(f"ipc://{path}")
    assert all(file.lstat().st_mtime_ns == stat.st_mtime_ns for file, stat in before.items())
    assert all(file.is_dir() or file.is_fifo() or file.read_text() for file in before)


def test_a_relative_address_is_that_of_the_callers_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config(*CHECKSUM, "--zmq-listen", "ipc://s").client_address == f"ipc://{tmp_path}/s"


@pytest.mark.parametrize("flags, said", [
    (("--model", ""), "--model is empty"),
    (("--model", "~nobody-of-this-name/m"), "no such model: ~nobody-of-this-name/m"),
    (("here", "--model", "there"), "two models given: here and there"),
    ((*CHECKSUM, "--model", "x"), "checksum takes no model, got x"),
    ((*CHECKSUM, "--served-model-name", "a\nb"), r"--served-model-name must be printable text on one line, got 'a\\nb'"),
    ((*CHECKSUM, "--served-model-name", ""), "--served-model-name must be printable"),
    ((*CHECKSUM, "--zmq-listen", ""), "must be ipc://PATH, got ''"),
    ((*CHECKSUM, "--zmq-listen", "ipc://@abstract"), "abstract sockets are open to every user"),
    ((*CHECKSUM, "--zmq-listen", "ipc:///tmp/a\nb"), "must be printable"),
])  # fmt: skip
def test_an_argument_that_means_nothing_is_refused(flags, said):
    with pytest.raises(ValueError, match=said):
        config(*flags)


def test_a_path_outside_the_locales_encoding_is_refused(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    (folder / "config.json").touch()
    with pytest.raises(ValueError, match="--model must be printable"):
        config("--model", str(folder), "--served-model-name", "x")


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert config(*CHECKSUM).cache_dir is None
    assert config(*CHECKSUM, XDG_CACHE_HOME="/var/cache").cache_dir == "/var/cache/stepahead"


@pytest.mark.parametrize("length", range(60, 110, 5))
def test_every_socket_of_the_default_folder_has_a_path_that_fits(length, tmp_path, monkeypatch):
    folder = Path(str(tmp_path / "long").ljust(length, "g"))
    folder.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    base = Path(default_client_address().removeprefix("ipc://")).parent
    assert len(f"{base}/run-abcdefgh/frontends") <= MAX_IPC_PATH


@pytest.mark.parametrize("blocks, size, said", [(1, 1, "a request needs two"), (2**31 - 2, 16, "--num-kv-blocks must be at most")])
def test_a_pool_that_cannot_serve_or_cannot_be_is_refused(blocks, size, said):
    with pytest.raises(ValueError, match=said):
        num_kv_blocks(config(*CHECKSUM, "--num-kv-blocks", str(blocks), "--block-size", str(size)), FakeModel(None))


class FakeModel(ChecksumModel):
    kv_bytes_per_token = 1024
    device = torch.device("cpu")


def test_an_engine_serves_on_when_nobody_reads_what_it_prints(tmp_path):
    """Standard output a closed pipe, and none of the three streams open."""
    sockets = [tmp_path / "a", tmp_path / "b"]
    command = [sys.executable, str(ROOT / "launch.py"), *CHECKSUM, "--port", "0", "--zmq-listen"]
    piped = subprocess.Popen([*command, f"ipc://{sockets[0]}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    piped.stdout.close()
    closed = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command, f"ipc://{sockets[1]}"])
    try:
        for process, path in zip((piped, closed), sockets):
            client = [sys.executable, "-c", CLIENT, f"ipc://{path}"]
            assert subprocess.run(client, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout == "checksum\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
            assert not path.exists()
        assert b"Traceback" not in piped.stderr.read()
    finally:
        piped.kill()
        closed.kill()
        piped.stderr.close()


CLIENT = "import sys; from frontend.client import Client; print(Client(sys.argv[1], connect_timeout=30).info().model)"


def test_a_signal_while_the_launcher_makes_its_folders_leaves_none(tmp_path):
    """Before, while and after it does; the process itself may still be ended by the signal when there is nothing to undo."""
    for delay in (0, 110, 150, 300):
        engine = EngineProcess(*CHECKSUM)
        time.sleep(delay / 1000)
        try:
            engine.process.send_signal(signal.SIGTERM)
            assert engine.process.wait(10) in (0, -signal.SIGTERM)
            engine.assert_gone(within_s=1)
            assert "Traceback" not in engine.errors()
        finally:
            engine.kill_all()


@pytest.fixture(scope="module")
def smollm2():
    with EngineProcess("--model", "smollm2-135m", "--max-model-len", "256", "--num-threads", "2") as engine:
        yield engine


def ask(engine: EngineProcess, prompt: str, tail: str = "", **environment: str) -> subprocess.CompletedProcess:
    command = f'"$0" -m frontend.client --temperature 0 --max-tokens 60 --address "$1" "$2" {tail}'
    arguments = ["bash", "-o", "pipefail", "-c", command, sys.executable, engine.address, prompt]
    return subprocess.run(arguments, cwd=ROOT, env=os.environ | environment, capture_output=True, timeout=60)


def test_the_command_line_ends_quietly_when_its_reader_has_enough(smollm2):
    done = ask(smollm2, "1, 2, 3,", "| head -c 1")
    assert (done.stdout, done.stderr, done.returncode) == (b" ", b"", 1)


def test_the_command_line_shows_what_a_poor_terminal_cannot(smollm2):
    rich = ask(smollm2, "Translate into French: the student was late. L'", PYTHONIOENCODING="utf-8")
    poor = ask(smollm2, "Translate into French: the student was late. L'", PYTHONIOENCODING="ascii")
    assert (rich.returncode, poor.returncode, poor.stderr) == (0, 0, b"") and "é" in rich.stdout.decode()
    assert poor.stdout == rich.stdout.decode().encode("ascii", "backslashreplace")


def test_a_chat_without_messages_is_refused(smollm2):
    with Client(smollm2.address) as client, pytest.raises(EngineError, match="messages is empty"):
        client.complete(messages=[])


def test_a_generator_may_outlive_its_client(smollm2):
    with Client(smollm2.address) as client:
        outputs = client.generate("Once", max_tokens=50)
        next(outputs)
    outputs.close()
