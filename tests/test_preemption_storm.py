"""A pool for 6 sequences and 64 requests of 20 + 400 tokens: preemption must neither cascade nor stall, nor change a token."""

import json
import subprocess
import sys

import pytest

from frontend.client import Client
from tests.checksum_reference import continuation
from tests.engine_process import ROOT, EngineProcess
from tests.simulation import Simulation
from tests.step_watch import StepWatch
from tests.test_checksum_engine import FLAGS, assert_back_to_start, idle_stats
from tests.threads import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_REQUESTS, PROMPT, NEW = 64, 20, 400
BLOCK = 16
POOL = 6 * 27  # blocks; 27 hold 420 tokens


@pytest.mark.parametrize(("depth", "cached", "num_places"), [(1, True, 0), (4, True, 0), (2, False, 0), (4, True, 1000), (2, False, 100)])
def test_each_request_is_preempted_a_few_times_and_the_oldest_is_always_at_work(depth, cached, num_places):
    limits = dict(block_size=BLOCK, num_rows=NUM_REQUESTS, max_model_len=PROMPT + NEW, max_step_tokens=512, num_host_blocks=num_places)
    sim = Simulation(num_blocks=POOL, max_pipeline_depth=depth, enable_prefix_caching=cached, **limits)
    watch = StepWatch(sim)
    for handle in range(NUM_REQUESTS):
        sim.add(handle, [handle] * PROMPT, NEW)
    oldest, missed = 0, 0  # the oldest request, and steps in a row without it
    while sim.step():
        missed = 0 if oldest in watch.handles[-1] else missed + 1
        assert missed <= depth, "only once its last token is in flight may others run without it"
        if oldest in sim.finished:
            oldest, missed = min(sim.outputs.keys() - sim.finished.keys(), default=None), 0
    sim.check_idle()
    assert sim.scheduler.num_preemptions == sum(watch.joins.values()) - NUM_REQUESTS > 0
    assert max(watch.joins.values()) - 1 < 10
    assert (sim.scheduler.swap.num_in > 0) == (num_places > 0)
    assert all(sim.outputs[handle] == continuation([handle] * PROMPT, NEW) for handle in range(NUM_REQUESTS))


@pytest.mark.parametrize("swap", [(), ("--swap-space", "0.01", "--preemption-mode", "swap")], ids=["recompute", "swap"])
def test_tokens_never_stall_for_a_second_in_the_real_processes(swap):
    flags = ("--num-kv-blocks", str(POOL), "--max-model-len", str(PROMPT + NEW), *swap)
    with EngineProcess(*FLAGS, *flags) as engine, Client(engine.address) as client:
        arguments = [engine.address, "0", str(NUM_REQUESTS), str(PROMPT), str(NEW)]
        command = [sys.executable, "-m", "tests.stream_clients", *arguments]
        report = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True).stdout)
        stats = idle_stats(client)
        assert_back_to_start(stats)
    print(f"\n{report}, {stats['num_preemptions']} preemptions, {stats['num_steps']} steps")
    assert report["longest_stall"] < 1
    assert 0 < stats["num_preemptions"] < 10 * NUM_REQUESTS
    assert (stats["num_blocks_in"] > 0) == bool(swap) and stats["free_host_blocks"] == stats["total_host_blocks"]
    assert stats["num_generated_tokens"] == NUM_REQUESTS * NEW
