"""Many concurrent streams, half of them over HTTP and half over ZMQ, around the checksum model: every token right, nothing left behind."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from frontend.client import Client
from tests.engine_process import ROOT, EngineProcess
from tests.test_checksum_engine import FLAGS, assert_back_to_start, idle_stats
from tests.test_metrics import scrape, value
from tests.test_soak import ROLES, resources

NUM_CLIENTS = 2
ROOM = ("--max-num-seqs", "1024", "--num-kv-blocks", "9000", "--max-model-len", "256", "--max-num-queued-reqs", "2000")


def run_clients(engine: EngineProcess, streams: int, seconds: float, seed: int) -> Counter[str]:
    """Client processes that share the streams; the sum of their counts."""
    share = str(streams // NUM_CLIENTS // 2)
    command = [sys.executable, "-m", "tests.door_clients", engine.address, engine.url]
    clients = [
        subprocess.Popen([*command, str(seed + i), share, share, str(seconds)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for i in range(NUM_CLIENTS)
    ]
    outputs = [client.communicate(timeout=seconds + 200)[0] for client in clients]
    assert all(client.returncode == 0 for client in clients)
    return sum((Counter(json.loads(output)) for output in outputs), Counter())


def check_run(engine: EngineProcess, client: Client, streams: int, seconds: float, seed: int) -> Counter[str]:
    """The counts, once rows and blocks are all back and the metrics agree."""
    before = scrape(engine.url)
    counts = run_clients(engine, streams, seconds, seed)
    assert_back_to_start(idle_stats(client))
    after = scrape(engine.url)
    grown = {name: value(after, name) - value(before, name) for name in ("generation_tokens_total", "e2e_request_latency_seconds_count")}
    assert grown["e2e_request_latency_seconds_count"] == counts["http"] + counts["zmq"]
    assert counts["tokens"] <= grown["generation_tokens_total"] <= counts["tokens"] + 100 * counts["left"]
    return counts


@pytest.mark.parametrize("frontends", ["1", "2"])
def test_streams_at_both_doors_get_their_own_tokens(frontends):
    with EngineProcess(*FLAGS, *ROOM, "--frontend-workers", frontends) as engine, Client(engine.address) as client:
        if frontends == "1":
            counts = check_run(engine, client, streams=100, seconds=4, seed=0)
        else:
            counts = run_clients(engine, streams=100, seconds=4, seed=0)
            assert_back_to_start(idle_stats(client))
    assert counts["http"] > 50 and counts["zmq"] > 50 and counts["left"] > 0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_minutes_of_a_thousand_streams_at_both_doors_leak_nothing():
    with EngineProcess(*FLAGS, *ROOM) as engine, Client(engine.address) as client:
        check_run(engine, client, streams=1000, seconds=30, seed=10_000)  # what is allocated once
        before = resources(engine)
        counts = check_run(engine, client, streams=1000, seconds=300, seed=0)
        after = resources(engine)
    print(f"\n{dict(counts)}; {before} -> {after}")
    for role in ROLES:
        assert after[role][:2] == before[role][:2], role
        assert after[role][2] < before[role][2] * 1.05 + 2, role
