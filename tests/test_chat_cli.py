"""A chat in a terminal, driven through one of its own, and through a pipe; a real engine with a tiny random model answers."""

import fcntl
import json
import os
import re
import select
import subprocess
import sys
import termios
import time

import psutil
import pytest

from frontend.client import Client
from tests import tiny_tokenizers
from tests.checkpoints import tiny_checkpoint
from tests.engine_process import ROOT, EngineProcess
from tests.scripted_scheduler import wait_until

MAX_MODEL_LEN = 30_000  # so that an answer takes as long as a test needs
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("chat"), vocab_size=600, max_position_embeddings=MAX_MODEL_LEN)
    tiny_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with EngineProcess("--model", str(folder), "--num-threads", "1", "--no-enable-prefix-caching") as running:
        yield running


def command(engine: EngineProcess, *options: str) -> list[str]:
    return [sys.executable, "-m", "frontend.client", "--chat", "--temperature", "0", "--address", engine.address, *options]


class Terminal:
    """A chat that believes to be in a terminal."""

    def __init__(self, engine: EngineProcess, *options: str):
        self.fd, theirs = os.openpty()
        self.process = subprocess.Popen(
            command(engine, *options),
            cwd=ROOT,
            env={**os.environ, "TERM": "dumb"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # else Ctrl-C is no signal
        )
        os.close(theirs)
        self.text = ""
        self.seen = 0

    def __enter__(self) -> "Terminal":
        self.wait_for("> ")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, pattern: str, seconds: float = 20) -> None:
        """Until the pattern is there, behind what was waited for before."""
        deadline = time.monotonic() + seconds
        while not (found := re.compile(pattern).search(self.text, self.seen)):
            assert time.monotonic() < deadline and self._read(), f"no {pattern!r} in {self.text[self.seen :]!r}"
        self.seen = found.end()

    def is_at_rest(self) -> bool:
        """Whether the chat waits for something."""
        return psutil.Process(self.process.pid).status() == psutil.STATUS_SLEEPING

    def end(self) -> int:
        """Read until the process has ended; returns its exit code."""
        while self._read():
            pass
        return self.process.wait(10)

    def _read(self) -> bool:
        if not select.select([self.fd], [], [], 20)[0]:
            return False
        try:
            self.text += os.read(self.fd, 65536).decode(errors="replace")
        except OSError:  # EIO: nobody has the other side any more
            return False
        return True


def usage(events: str) -> list[dict]:
    """Of every answer."""
    found = [json.loads(line) for line in events.splitlines() if line.startswith('{"type":"output"')]
    return [event["usage"] for event in found if event["usage"]]


def through_a_pipe(engine: EngineProcess, lines: list[str], *options: str) -> subprocess.CompletedProcess:
    text = "".join(f"{line}\n" for line in lines)
    return subprocess.run(command(engine, *options), cwd=ROOT, input=text, capture_output=True, text=True, timeout=60)


def stats(engine: EngineProcess) -> dict[str, int]:
    with Client(engine.address) as client:
        return client.info().stats


def test_turns_see_those_before_them_until_the_end_of_input(engine):
    with Terminal(engine, "--json", "--max-tokens", "5") as terminal:
        for line in ("hello", "hello", "/reset", "hello"):
            terminal.type(f"{line}\n")
            if line == "hello":
                terminal.wait_for('"completion_tokens":5')
            terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    first, second, third = (int(found) for found in re.findall(r'"prompt_tokens":(\d+)', terminal.text))
    assert first == third < second - 5 and "/quit or Ctrl-D ends" in terminal.text


def test_ctrl_c_stops_the_answer_and_keeps_the_chat_and_what_was_said(engine):
    (only,) = tiny_tokenizers.byte_level().encode("x").ids  # what the model says must not look like the next prompt
    with Terminal(engine, "--allowed-token-ids", str(only)) as terminal:
        before = stats(engine)["num_prompt_tokens"]
        terminal.type("go on\n")
        prompts = []
        for _ in range(2):
            assert wait_until(lambda: stats(engine)["num_running"] == 1, 10)
            terminal.wait_for("x{40}")
            terminal.type(CTRL_C)
            terminal.wait_for("\n> ")
            assert wait_until(lambda: stats(engine)["num_running"] == 0, 10)
            prompts.append(stats(engine)["num_prompt_tokens"] - before - sum(prompts))
            terminal.type("go on\n")
        terminal.wait_for("x{40}")
        terminal.type(CTRL_C)
        terminal.wait_for("\n> ")
        assert wait_until(terminal.is_at_rest, 10)  # input() misses a signal between its prompt and its wait for a key
        terminal.type(CTRL_C)  # with nothing to stop
        terminal.wait_for("> ")
        terminal.type("/quit\n")
        assert terminal.end() == 0 and "Traceback" not in terminal.text
    assert prompts[0] + 10 < prompts[1]


def test_ctrl_c_before_any_word_takes_the_turn_back(engine):
    with Terminal(engine, "--no-stream", "--json") as terminal:
        before = stats(engine)["num_prompt_tokens"]
        prompts = []
        for _ in range(2):
            terminal.type("hello\n")
            assert wait_until(lambda: stats(engine)["num_running"] == 1, 10)
            prompts.append(stats(engine)["num_prompt_tokens"] - before - sum(prompts))
            terminal.type(CTRL_C)
            terminal.wait_for("> ")
            assert wait_until(lambda: stats(engine)["num_running"] == 0, 10)
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    assert prompts[0] == prompts[1]


def test_a_pipe_is_a_chat_too_and_an_error_does_not_end_it(engine):
    lines = ["", "hello", "word " * 10 * MAX_MODEL_LEN, "hello", "/nonsense", "/reset", "hello", "/quit", "never"]
    done = through_a_pipe(engine, lines, "--json", "--max-tokens", "5")
    assert done.returncode == 0
    too_long, no_command = done.stderr.splitlines()
    assert "error: " in too_long and str(MAX_MODEL_LEN) in too_long and "no such command" in no_command
    first, second, third = (each["prompt_tokens"] for each in usage(done.stdout))
    assert first == third < second
    assert [json.loads(line)["code"] for line in done.stdout.splitlines() if '"error"' in line] == [400]


def test_a_system_message_comes_first_and_stays(engine):
    options = ("--json", "--max-tokens", "5")
    lines = ["hello", "/reset", "hello"]
    plain, told = (usage(through_a_pipe(engine, lines, *options, *more).stdout) for more in ((), ("--system", "Be brief.")))
    assert plain[0] == plain[1] and told[0] == told[1]
    added = len(tiny_tokenizers.byte_level().encode("system: Be brief.\n").ids)
    assert told[0]["prompt_tokens"] - plain[0]["prompt_tokens"] == added
    one_turn = subprocess.run([*command(engine, *options), "--system", "Be brief.", "hello"], cwd=ROOT, capture_output=True, text=True)
    assert usage(one_turn.stdout)[0] == told[0]


WRONG = [((), "a prompt is missing"), (("--system", "x", "hello"), "--system has no effect without --chat")]


@pytest.mark.parametrize("wrong, said", WRONG)
def test_what_means_nothing_is_refused(wrong, said):
    done = subprocess.run([sys.executable, "-m", "frontend.client", *wrong], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr


def test_a_chat_without_an_engine_ends_with_an_error(tmp_path):
    asked = [sys.executable, "-m", "frontend.client", "--chat", "--address", f"ipc://{tmp_path}/nobody", "--connect-timeout", "0.3"]
    done = subprocess.run(asked, cwd=ROOT, input="hello\n", capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == f"error: no answer from the engine at ipc://{tmp_path}/nobody\n"
