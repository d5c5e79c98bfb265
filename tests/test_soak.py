"""Minutes of random load around the checksum model: every token right, nothing leaked, nothing slower at the end."""

import time

import psutil
import pytest

from frontend.client import Client
from tests.engine_process import EngineProcess
from tests.test_checksum_engine import FLAGS, assert_back_to_start, idle_stats, run_clients

MINUTES = 5
ROLES = ("launcher", "frontend", "scheduler", "worker")


def resources(engine: EngineProcess) -> dict[str, tuple[int, int, float]]:
    """Open files, threads and resident MiB of each process."""
    processes = {role: psutil.Process(engine.pid_of(role)) for role in ROLES}
    return {role: (p.num_fds(), p.num_threads(), p.memory_info().rss / 2**20) for role, p in processes.items()}


@pytest.mark.soak
@pytest.mark.timeout(60 * (MINUTES + 5))
def test_minutes_of_load_with_aborts_and_preemptions_leak_nothing():
    """A pool of a quarter of the need; a third of the requests aborted; prefix blocks evicted all the time."""
    flags = ("--max-num-seqs", "64", "--num-kv-blocks", "400", "--max-model-len", "600")
    with EngineProcess(*FLAGS, *flags) as engine, Client(engine.address) as client:
        rounds, num_requests, seconds = 0, 0, []
        deadline = time.monotonic() + 60 * MINUTES
        while time.monotonic() < deadline:
            began = time.monotonic()
            counts = run_clients(engine.address, count=4, num_requests=150, abort_share=1 / 3, most_tokens=300, seed=1000 * rounds)
            seconds.append(time.monotonic() - began)
            num_requests += sum(count["requests"] for count in counts)
            rounds += 1
            if rounds == 3:  # warm: caches full, allocators settled
                idle_stats(client)
                before = resources(engine)
        stats = idle_stats(client)
        after = resources(engine)
        print(f"\n{rounds} rounds, {num_requests} requests, {stats['num_steps']} steps, {stats['num_preemptions']} preemptions")
        print(f"seconds a round: first {seconds[2]:.1f}, last {seconds[-1]:.1f}; {before} -> {after}")
        assert_back_to_start(stats)
        assert stats["num_preemptions"] > 0
        for role in ROLES:
            assert after[role][:2] == before[role][:2], role
            assert after[role][2] < before[role][2] * 1.05 + 2, role
