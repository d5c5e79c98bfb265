"""Thousands of tokens through the real processes around the checksum model: none wrong, lost or doubled, nothing left over."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from frontend.client import Client, EngineError
from tests.checksum_reference import continuation
from tests.engine_process import ROOT, EngineProcess

FLAGS = ("--executor", "checksum", "--num-threads", "1")


def run_clients(address: str, count: int, num_requests: int, abort_share: float, most_tokens: int, seed: int = 0) -> list[dict]:
    """Client processes side by side; their counts."""
    command = [sys.executable, "-m", "tests.checksum_client", address]
    rest = [str(num_requests), str(abort_share), str(most_tokens)]
    clients = [
        subprocess.Popen([*command, str(seed + i), *rest], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(count)
    ]
    outputs = [client.communicate(timeout=250) for client in clients]
    assert all(client.returncode == 0 for client in clients), "\n".join(errors for _, errors in outputs)
    return [json.loads(output) for output, _ in outputs]


def idle_stats(client: Client, within_s: float = 5) -> dict[str, int]:
    """The statistics once nothing is tracked any more."""
    deadline = time.monotonic() + within_s
    while True:
        stats = client.info().stats
        if stats["num_tracked"] == 0 and stats["open_requests"] == 0:
            return stats
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)


def assert_back_to_start(stats: dict[str, int]) -> None:
    assert stats["free_blocks"] == stats["total_blocks"]
    assert stats["free_rows"] == stats["total_rows"]
    assert (stats["num_running"], stats["num_waiting"], stats["num_malformed"]) == (0, 0, 0)


def test_500_concurrent_requests_from_4_clients_a_third_aborted():
    with EngineProcess(*FLAGS, "--max-num-seqs", "128", "--num-kv-blocks", "3000") as engine:
        counts = run_clients(engine.address, count=4, num_requests=125, abort_share=1 / 3, most_tokens=300)
        assert sum(count["requests"] for count in counts) == 500
        assert 100 < sum(count["aborted"] for count in counts) < 240
        with Client(engine.address) as client:
            assert_back_to_start(idle_stats(client))


@pytest.mark.parametrize("depth", ["1", "4"])
def test_a_pool_far_too_small_for_the_load_preempts_and_still_serves_all(depth):
    flags = ("--max-num-seqs", "32", "--num-kv-blocks", "40", "--max-model-len", "640", "--max-pipeline-depth", depth)
    with EngineProcess(*FLAGS, *flags, "--max-num-batched-tokens", "64") as engine:
        run_clients(engine.address, count=2, num_requests=60, abort_share=0.2, most_tokens=400)
        with Client(engine.address) as client:
            stats = idle_stats(client)
            assert_back_to_start(stats)
            assert stats["num_preemptions"] > 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_killed_in_the_middle_gives_its_rows_back(stream):
    program = (
        "import sys; from frontend.client import Client\n"
        f"for output in Client(sys.argv[1]).generate(prompt_ids=[1], max_tokens=4000, stream={stream}): print('.', flush=True)"
    )
    with EngineProcess(*FLAGS, "--max-num-seqs", "2") as engine, Client(engine.address) as client:
        victim = subprocess.Popen([sys.executable, "-c", program, engine.address], cwd=ROOT, stdout=subprocess.DEVNULL)
        while client.info().stats["num_running"] == 0:
            time.sleep(0.02)
        victim.kill()
        victim.wait()
        assert_back_to_start(idle_stats(client, within_s=3))
        assert client.complete(prompt_ids=[7], max_tokens=9, temperature=0.0).token_ids == continuation([7], 9)


@pytest.mark.parametrize("action", ["raise", "exit", "kill", "abort"])
def test_a_worker_that_fails_in_a_step_ends_every_request_with_an_error(action):
    process = EngineProcess(*FLAGS, environment={**os.environ, "STEPAHEAD_FAIL": f"worker.step:30:{action}"})
    try:
        process.wait_ready()
        with Client(process.address) as client, pytest.raises(EngineError) as error:
            list(client.generate(prompt_ids=[1, 2], max_tokens=200))
        assert error.value.code == 500
        assert process.process.wait(5) == 1
        assert process.reason().startswith("worker")
        process.assert_gone(within_s=1)
    finally:
        process.kill_all()


def test_an_idle_engine_uses_no_cpu():
    with EngineProcess(*FLAGS) as engine:
        roles = [psutil.Process(engine.pid_of(role)) for role in ("launcher", "worker", "scheduler", "frontend")]
        with Client(engine.address) as client:
            client.complete(prompt_ids=[1], max_tokens=5)
        time.sleep(0.5)
        before = [sum(role.cpu_times()[:2]) for role in roles]
        time.sleep(2)
        assert sum(sum(role.cpu_times()[:2]) for role in roles) - sum(before) < 0.1


def test_requests_in_flight_get_an_error_when_the_engine_is_stopped():
    process = EngineProcess(*FLAGS)
    try:
        process.wait_ready()
        with Client(process.address) as client, pytest.raises(EngineError, match="shutting down"):
            for output in client.generate(prompt_ids=[1], max_tokens=4000):
                if output.seq == 5:
                    process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(5) == 0
        process.assert_gone(within_s=1)
    finally:
        process.kill_all()
