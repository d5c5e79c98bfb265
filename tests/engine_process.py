"""A real engine for a test: `launch.py` and its children, on an address of its own."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
MODULES = {"worker": "worker.main", "scheduler": "scheduler.main", "frontend": "frontend.main"}


class EngineProcess:
    """Starts `launch.py` with the given flags; a context manager that stops it and asserts that nothing is left."""

    def __init__(self, *flags: str, environment: dict[str, str] | None = None, address: str | None = None):
        if not {"--port", "--uds", "--no-http"}.intersection(flags):
            flags += ("--port", "0")
        if "--shutdown-timeout" not in flags:
            flags += ("--shutdown-timeout", "0")
        self.url = ""
        self.folder = tempfile.TemporaryDirectory(prefix="engine-")
        self.address = address or f"ipc://{self.folder.name}/s"
        self.stderr = open(Path(self.folder.name) / "stderr", "w+")
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "launch.py"), *flags, "--zmq-listen", self.address],
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            env=environment,
        )
        self.pids: set[int] = {self.process.pid}
        self.run_dir: Path | None = None

    def __enter__(self) -> "EngineProcess":
        self.wait_ready()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            code = self.stop()
            if kind is None:
                assert code == 0, self.errors()
                self.assert_gone()
        finally:
            self.kill_all()

    def wait_ready(self, timeout_s: float = 120) -> None:
        """Until the ready line; fails with what the engine said when it ends first."""
        line = self.process.stdout.readline()
        assert line.startswith("ready: "), f"{line!r}\n{self.errors()}"
        self.url = line.split(" and ")[-1].strip()
        self.remember()

    def remember(self) -> None:
        """Note the processes and the run directory of now, to look for them after the end."""
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            self.pids.add(process.pid)
            if found := re.search(r"(\S+)/config\.json", " ".join(process.cmdline())):
                self.run_dir = Path(found[1])

    def pid_of(self, name: str, timeout_s: float = 20) -> int:
        """The process of a role, the first of several: launcher, worker, scheduler or frontend."""
        if name == "launcher":
            return self.process.pid
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                if MODULES[name] in child.cmdline():
                    self.remember()
                    return child.pid
            time.sleep(0.02)
        raise AssertionError(f"no {name} after {timeout_s} s")

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 10) -> int:
        """Signal the launcher; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def errors(self) -> str:
        """What the engine wrote to standard error."""
        self.stderr.flush()
        return Path(self.stderr.name).read_text()

    def reason(self) -> str:
        """The launcher's own line."""
        lines = [line for line in self.errors().splitlines() if line.startswith("stepahead: ")]
        assert len(lines) == 1, self.errors()
        return lines[0].removeprefix("stepahead: ")

    def assert_gone(self, within_s: float = 5) -> None:
        """No process, run directory, socket or lock file is left."""
        deadline = time.monotonic() + within_s
        while left := self.leftovers():
            assert time.monotonic() < deadline, f"left after {within_s} s: {left}\n{self.errors()}"
            time.sleep(0.02)

    def leftovers(self) -> list[str]:
        alive = [f"pid {pid}" for pid in self.pids if psutil.pid_exists(pid) and not self._is_zombie(pid)]
        socket = Path(self.address.removeprefix("ipc://"))
        files = [socket, socket.with_name(socket.name + ".lock"), *([self.run_dir] if self.run_dir else [])]
        return alive + [str(path) for path in files if path.exists()]

    def _is_zombie(self, pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def kill_all(self) -> None:
        """Whatever happened, leave nothing behind for the next test."""
        for pid in self.pids:
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()
        self.process.wait()
        self.process.stdout.close()
        self.stderr.close()
        self.folder.cleanup()
