"""KV of preempted requests, copied to host memory and back: nobody's tokens change, and every place is given back."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from protocol.messages import Swap, pack
from scheduler.policy import swap_is_cheaper
from tests.checkpoints import tiny_checkpoint
from tests.checksum_reference import continuation
from tests.engine_process import EngineProcess
from tests.scenarios import TINY
from tests.simulation import Simulation
from tests.test_checksum_engine import FLAGS
from worker.loading import load_model
from worker.staging import HostStaging
from worker.swap import AT_ONCE, BlockSwapper, HostLane

BLOCK = 4
TIGHT = dict(num_rows=8, num_blocks=24, block_size=BLOCK, max_model_len=60, preemption_mode="swap")


def crowd(sim: Simulation, count: int = 12) -> None:
    """More than the pool holds, of different lengths, all at once."""
    for handle in range(count):
        sim.add(handle, [handle + 1] * (5 + handle), 30)


def saved(sim: Simulation) -> list[int]:
    """Requests whose KV lies in host memory now."""
    return [request.handle for request in sim.scheduler.requests.values() if request.saved_places is not None]


def assert_own_tokens(sim: Simulation, count: int = 12) -> None:
    assert all(sim.outputs[handle] == continuation([handle + 1] * (5 + handle), 30) for handle in range(count))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_crowd_with_swap_gets_its_own_tokens_at_every_depth(depth, cached):
    sim = Simulation(**TIGHT, num_host_blocks=200, max_pipeline_depth=depth, enable_prefix_caching=cached)
    crowd(sim)
    sim.run()
    assert_own_tokens(sim)
    assert sim.scheduler.swap.num_out >= sim.scheduler.swap.num_in > 0


@pytest.mark.parametrize("depth", [1, 4])
def test_a_transformer_with_swap_gives_the_tokens_of_one_without_preemption(depth, tmp_path):
    folder = str(tiny_checkpoint(tmp_path, "qwen3", **TINY))
    outputs = []
    for limits in (dict(TIGHT, num_blocks=400), dict(TIGHT, num_host_blocks=200, max_pipeline_depth=depth)):
        sim = Simulation(load_model(folder, "float32", "cpu", 60), **limits)
        crowd(sim)
        sim.run()
        outputs.append(sim.outputs)
    assert outputs[0] == outputs[1]
    assert sim.scheduler.swap.num_in > 0


def test_what_is_swapped_in_is_not_computed_again():
    """The passes of the preempted: one token each to go on with."""
    sim = Simulation(**TIGHT, num_host_blocks=200, enable_prefix_caching=False)
    run, sizes = sim.worker.run, []

    def watch(payload):
        plan = sim.scheduler.in_flight[-1]
        sizes.extend(len(chunk.tokens) // 4 for chunk in plan.delta.chunks)
        return run(payload)

    sim.worker.run = watch
    crowd(sim)
    sim.run()
    assert sum(sizes) == sum(5 + handle for handle in range(12)) + sim.scheduler.num_preemptions


def test_copies_to_a_wrong_place_would_show():
    """The test above can fail: with two places exchanged on the way out, some token differs."""
    sim = Simulation(**TIGHT, num_host_blocks=200)
    swapper = sim.worker.executor.batch.swapper
    run = swapper.run
    swapper.run = lambda swaps: run([_exchanged(swap) if swap.is_out else swap for swap in swaps])
    crowd(sim)
    sim.run()
    with pytest.raises(AssertionError):
        assert_own_tokens(sim)


def _exchanged(swap: Swap) -> Swap:
    return Swap(swap.is_out, swap.blocks, np.frombuffer(swap.places, dtype="<i4")[::-1].tobytes())


def test_without_enough_places_a_request_is_computed_anew():
    sim = Simulation(**TIGHT, num_host_blocks=4)
    crowd(sim)
    sim.run()
    assert_own_tokens(sim)
    assert 0 < sim.scheduler.swap.num_out < BLOCK * sim.scheduler.num_preemptions


@pytest.mark.parametrize("seed", range(8))
def test_places_of_aborted_requests_are_given_back(seed):
    rng = random.Random(seed)
    sim = Simulation(**TIGHT, num_host_blocks=60, max_pipeline_depth=rng.randint(1, 4))
    crowd(sim)
    aborted = set()
    while sim.step():
        for handle in saved(sim):
            if rng.random() < 0.5:
                sim.abort(handle)
                aborted.add(handle)
        sim.scheduler.check()
    sim.check_idle()
    assert aborted
    assert all(sim.outputs[h] == continuation([h + 1] * (5 + h), 30) for h in set(range(12)) - aborted)


def test_blocks_found_in_the_prefix_index_are_not_copied_in():
    sim = Simulation(**dict(TIGHT, num_blocks=30), num_host_blocks=200)
    crowd(sim, 6)
    sim.run()
    assert sim.scheduler.num_preemptions > 0
    assert sim.scheduler.swap.num_in < sim.scheduler.swap.num_out


def test_swaps_equal_plain_copies_in_the_order_given():
    """Random swaps, several in one step, that use each other's blocks and places again, more than are copied at once."""
    rng = random.Random(0)
    kv_CP = torch.randn(3, 40, 2, BLOCK, 5)
    swapper = BlockSwapper(kv_CP, 50, HostLane(), HostStaging())
    swapper.host_HC.zero_()
    pool, host = kv_CP.clone(), swapper.host_HC.clone()
    for _ in range(50):
        swaps = []
        for _ in range(rng.randint(1, 4)):
            count = rng.randint(1, 2 * AT_ONCE)
            blocks, places, is_out = rng.sample(range(40), count), rng.sample(range(50), count), rng.random() < 0.5
            swaps.append(Swap(is_out, pack(blocks), pack(places)))
            for block, place in zip(blocks, places):
                if is_out:
                    host[place] = pool[:, block]
                else:
                    pool[:, block] = host[place]
        swapper.run(swaps)
        assert torch.equal(swapper.host_HC, host) and torch.equal(kv_CP, pool)


def test_the_cheaper_way_back_is_chosen():
    assert swap_is_cheaper(num_blocks=10, num_tokens=160, block_copy_s=1e-4, prompt_token_s=0.0)
    assert swap_is_cheaper(num_blocks=10, num_tokens=160, block_copy_s=1e-4, prompt_token_s=2e-5)
    assert not swap_is_cheaper(num_blocks=10, num_tokens=160, block_copy_s=1e-4, prompt_token_s=1e-5)
    counts = Counter()
    for prompt_token_s in (1e-9, 1.0):
        sim = Simulation(**dict(TIGHT, preemption_mode="auto"), num_host_blocks=200, block_copy_s=1e-3)
        sim.scheduler.swap.prompt_token_s = prompt_token_s
        crowd(sim)
        sim.run()
        assert_own_tokens(sim)
        counts[prompt_token_s] = sim.scheduler.swap.num_out
    assert counts[1e-9] == 0 < counts[1.0]


@pytest.mark.parametrize("flags", [("--swap-space", "-1"), ("--swap-space", "1000000"), ("--preemption-mode", "none")])
def test_impossible_swap_settings_end_the_start_with_the_flag_named(flags):
    engine = EngineProcess(*FLAGS, *flags)
    try:
        assert engine.process.wait(30) != 0
        assert flags[0] in engine.errors()
    finally:
        engine.kill_all()
