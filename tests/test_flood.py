"""A flood of short unique prompts through the real processes: what each leaves behind, in megabytes."""

import subprocess
import sys
import time

import psutil
import pytest

from frontend.client import Client
from tests.engine_process import ROOT, EngineProcess
from tests.test_checksum_engine import FLAGS, assert_back_to_start, idle_stats

# Two clients of 150 open requests; a pool of 400 blocks, so that each block is evicted over and over.
NUM_CLIENTS, OPEN = 2, 150
ENGINE = ("--max-num-seqs", "128", "--num-kv-blocks", "400", "--block-size", "4", "--max-model-len", "64")
WATCHED = ("scheduler", "frontend")


def flood(address: str, first: int, count: int) -> None:
    """Requests number first to first + count, from client processes side by side."""
    share = count // NUM_CLIENTS
    command = [sys.executable, "-m", "tests.flood_client", address]
    clients = [
        subprocess.Popen([*command, str(first + i * share), str(share), str(OPEN)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for i in range(NUM_CLIENTS)
    ]
    errors = [client.communicate()[1] for client in clients]
    assert all(client.returncode == 0 for client in clients), "\n".join(errors)


def flood_and_watch(num_rounds: int, per_round: int, warm_rounds: int) -> tuple[list[dict[str, float]], float]:
    """Resident MiB of the watched processes after each round past the warm ones, and requests per second."""
    samples = []
    with EngineProcess(*FLAGS, *ENGINE) as engine, Client(engine.address) as client:
        processes = {role: psutil.Process(engine.pid_of(role)) for role in WATCHED}
        began = time.monotonic()
        for i in range(num_rounds):
            flood(engine.address, i * per_round, per_round)
            stats = idle_stats(client)
            assert_back_to_start(stats)
            samples.append({role: process.memory_info().rss / 2**20 for role, process in processes.items()})
        rate = num_rounds * per_round / (time.monotonic() - began)
        assert stats["num_generated_tokens"] == 2 * num_rounds * per_round
    return samples[warm_rounds - 1 :], rate


def grown(samples: list[dict[str, float]]) -> dict[str, float]:
    """How many times the first sample the largest is."""
    return {role: max(sample[role] for sample in samples) / samples[0][role] for role in WATCHED}


def test_thousands_of_unique_prompts_leave_nothing_behind():
    samples, rate = flood_and_watch(num_rounds=4, per_round=2500, warm_rounds=2)
    print(f"\n{rate:.0f} requests/s, {samples}")
    assert all(factor < 1.05 for factor in grown(samples).values()), samples


@pytest.mark.soak
@pytest.mark.timeout(60 * 40)
def test_half_a_million_unique_prompts_leave_nothing_behind():
    samples, rate = flood_and_watch(num_rounds=50, per_round=10_000, warm_rounds=3)
    print(f"\n{rate:.0f} requests/s, {samples[0]} -> {samples[-1]}, grown {grown(samples)}")
    assert all(factor < 1.05 for factor in grown(samples).values()), samples
