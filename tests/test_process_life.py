"""However the engine ends, it ends whole: one reason on one line, the right exit code, nothing left."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.checkpoints import tiny_checkpoint
from tests.engine_process import EngineProcess

CHECKSUM = ("--executor", "checksum", "--num-threads", "1")
ROLES = ("launcher", "frontend", "scheduler", "worker")


@pytest.fixture
def engine():
    """Starts engines; kills what a failed test leaves."""
    started = []

    def start(*flags: str, **options) -> EngineProcess:
        started.append(EngineProcess(*flags, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill_all()


@pytest.mark.parametrize("victim", ROLES)
def test_kill_9_of_any_process_ends_the_others(engine, victim):
    process = engine(*CHECKSUM)
    process.wait_ready()
    os.kill(process.pid_of(victim), signal.SIGKILL)
    assert process.process.wait(5) != 0
    process.assert_gone(within_s=5)
    if victim != "launcher":
        assert process.reason() == f"{victim} was killed by SIGKILL"


@pytest.mark.parametrize("victim", ROLES)
def test_kill_9_during_the_start_ends_the_others(engine, victim):
    process = engine(*CHECKSUM)
    os.kill(process.pid_of(victim), signal.SIGKILL)
    assert process.process.wait(5) != 0
    process.assert_gone(within_s=5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_with_exit_code_0(engine, number):
    process = engine(*CHECKSUM)
    process.wait_ready()
    began = time.monotonic()
    assert process.stop(number) == 0
    assert time.monotonic() - began < 5
    process.assert_gone(within_s=0.5)
    assert "Traceback" not in process.errors()


def test_a_signal_during_the_start_ends_everything(engine):
    process = engine(*CHECKSUM)
    process.pid_of("frontend")
    assert process.stop() == 0
    process.assert_gone(within_s=0.5)
    assert "Traceback" not in process.errors()


def test_two_quick_signals_end_a_stopped_child_too(engine):
    process = engine(*CHECKSUM)
    process.wait_ready()
    os.kill(process.pid_of("worker"), signal.SIGSTOP)
    process.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.stop() == 0
    process.assert_gone(within_s=0.5)


@pytest.mark.parametrize(
    ("failpoint", "reason"),
    [
        ("worker.load:0:raise", "worker: RuntimeError: failpoint at worker.load 0"),
        ("worker.load:0:exit", "worker ended with exit code 0"),
        ("worker.load:0:abort", "worker was killed by SIGABRT"),
    ],
)
def test_a_worker_that_fails_while_loading_is_the_reason(engine, failpoint, reason):
    process = engine(*CHECKSUM, environment={**os.environ, "STEPAHEAD_FAIL": failpoint})
    assert process.process.wait(30) == 1
    assert process.reason() == reason
    process.assert_gone(within_s=0.5)


def test_a_second_engine_on_an_address_is_refused_and_the_first_lives_on(engine):
    first = engine(*CHECKSUM)
    first.wait_ready()
    began = time.monotonic()
    second = engine(*CHECKSUM, address=first.address)
    assert second.process.wait(10) == 2
    assert time.monotonic() - began < 3
    assert second.reason() == f"cannot listen on {first.address}: another engine serves it"
    assert first.stop() == 0


def test_an_engine_starts_where_another_was_killed(engine):
    first = engine(*CHECKSUM)
    first.wait_ready()
    os.kill(first.process.pid, signal.SIGKILL)
    first.assert_gone(within_s=5)
    second = engine(*CHECKSUM, address=first.address)
    second.wait_ready()
    assert second.stop() == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model", "/no/such/model"), "no such model: /no/such/model"),
        (("--max-num-seqs", "0"), "--max-num-seqs must be between 1 and 4096, got 0"),
        (("--max-pipeline-depth", "99"), "--max-pipeline-depth must be between 1 and 8, got 99"),
        (("--block-size", "5"), "--block-size must be one of 1, 2, 4, 8, 16, 32, 64, 128, got 5"),
        (("--kv-cache-gib", "nan"), "--kv-cache-gib must be between"),
    ],
)
def test_a_bad_argument_is_one_line(engine, flags, reason):
    process = engine("--executor", "checksum", *flags) if flags[0] != "--model" else engine(*flags)
    assert process.process.wait(10) == 2
    assert process.reason().startswith(reason)
    assert process.errors().count("\n") == 1


def cut_a_shard(folder: Path) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])


def name_another_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))


@pytest.mark.parametrize(
    ("damage", "reason"), [(cut_a_shard, r"model\.safetensors: .*cut short"), (name_another_architecture, "MambaForCausalLM.*Llama")]
)
def test_a_model_that_cannot_be_loaded_is_one_line(engine, damage, reason, tmp_path):
    damage(tiny_checkpoint(tmp_path))
    process = engine("--model", str(tmp_path))
    assert process.process.wait(30) == 2
    assert re.search(reason, process.reason())
    assert "Traceback" not in process.errors()
    process.assert_gone(within_s=0.5)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "ipc://", "ipc:///no/such/folder/s", "ipc:///tmp/" + "x" * 120])
def test_an_address_that_cannot_be_served_is_one_line(engine, address):
    process = engine(*CHECKSUM, address=address)
    assert process.process.wait(10) == 2
    assert "address must be ipc://PATH" in process.reason() or "folder does not exist" in process.reason() or "107" in process.reason()
    assert process.errors().count("\n") == 1
