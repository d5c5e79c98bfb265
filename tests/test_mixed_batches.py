"""Requests of different kinds in one batch: short beside long, chunks of every size, greedy beside sampled."""

import random

import pytest

from protocol.sampling import RowSampling, SamplingParams, row_sampling
from tests.checksum_reference import continuation
from tests.simulation import GREEDY, Simulation
from tests.threads import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_blocks_freed_by_short_requests_and_used_again_at_once_harm_no_long_one(depth):
    """Half of 32 rows run 300 tokens; the others end after 1 to 3, and their blocks go to the next in the same step."""
    rng = random.Random(depth)
    long_ones = [[rng.randrange(1000) for _ in range(5)] for _ in range(16)]
    short_ones = [([rng.randrange(1000) for _ in range(rng.randint(1, 12))], rng.randint(1, 3)) for _ in range(600)]
    sim = Simulation(
        num_rows=32, block_size=4, num_blocks=16 * 77 + 40, max_model_len=308, max_pipeline_depth=depth, enable_prefix_caching=False
    )
    for handle, prompt in enumerate(long_ones):
        sim.add(handle, prompt, 300)
    for handle, (prompt, count) in enumerate(short_ones, start=100):
        sim.add(handle, prompt, count)
    sim.run()
    assert all(sim.outputs[handle] == continuation(prompt, 300) for handle, prompt in enumerate(long_ones))
    assert all(sim.outputs[handle] == continuation(prompt, count) for handle, (prompt, count) in enumerate(short_ones, start=100))


@pytest.mark.parametrize("beside", [0, 6], ids=["alone", "beside streams"])
@pytest.mark.parametrize("chunk", [16, 48, 64])
def test_prompts_that_end_around_the_borders_of_chunks_and_blocks(chunk, beside):
    block = 16
    lengths = [chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 3, 3 * block, 3 * block + 1, 5 * block - 1]
    sim = Simulation(num_rows=7, block_size=block, num_blocks=400, max_step_tokens=chunk)
    for handle in range(beside):
        sim.add(handle, [handle], 200)
    for i, length in enumerate(lengths):
        sim.add(100 + i, [i] * length, 6)
        while 100 + i not in sim.finished:
            sim.step()
    sim.run()
    assert all(sim.outputs[100 + i] == continuation([i] * length, 6) for i, length in enumerate(lengths))
    assert all(sim.outputs[handle] == continuation([handle], 200) for handle in range(beside))


TINY_TEMPERATURES = [SamplingParams(temperature=t, top_p=p, seed=1) for t in (0.0, 1e-8, 1e-5, 1e-4, 1e-2) for p in (1e-8, 1e-4, 1.0)]
ONE_TOKEN_LEFT = [SamplingParams(temperature=1.0, seed=2, **one) for one in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0})]
GREEDY_WITH_FILTERS = [SamplingParams(temperature=0.0, top_k=5, top_p=0.1, min_p=0.3, seed=3)]


def test_whatever_leaves_one_token_is_greedy_beside_requests_that_are_not():
    """Tiny temperatures, filters that keep one token, and greedy requests with filters; each between two that sample freely."""
    greedy = TINY_TEMPERATURES + ONE_TOKEN_LEFT + GREEDY_WITH_FILTERS
    free = [RowSampling(temperature=1.0, top_k=top_k, seed=i) for i, top_k in enumerate([0, 10**9, 1000, 1001, 7] * 4)]
    alone = [[] for _ in free]
    for i, sampling in enumerate(free):
        sim = Simulation(num_rows=1)
        sim.add(0, [i, 5], 20, sampling=sampling)
        sim.run()
        alone[i] = sim.outputs[0]
    sim = Simulation(num_rows=40, num_blocks=1000)
    for i in range(20):
        sim.add(i, [i, 3], 20, sampling=row_sampling(greedy[i % len(greedy)], random_seed=0))
        sim.add(100 + i, [i, 5], 20, sampling=free[i])
    sim.run()
    assert all(sim.outputs[i] == continuation([i, 3], 20) for i in range(20))
    assert [sim.outputs[100 + i] for i in range(20)] == alone
    assert all(sim.outputs[100 + i] != continuation([i, 5], 20) for i in range(20)), "these were to sample freely"


def test_a_seeded_request_is_the_same_beside_any_neighbours_and_after_their_abort():
    seeded = RowSampling(temperature=0.8, seed=42)
    outputs = []
    for neighbours in ([], [GREEDY], [RowSampling(temperature=0.8, seed=7)], [RowSampling(temperature=1.0, seed=i) for i in range(15)]):
        for num_aborted in (0, len(neighbours)):
            sim = Simulation(num_rows=16, max_pipeline_depth=4)
            for handle, sampling in enumerate(neighbours, start=1):
                sim.add(handle, [4, 4], 20, sampling=sampling)
            sim.add(0, [1, 2, 3], 32, sampling=seeded)
            for _ in range(5):
                sim.step()
            for handle in range(1, num_aborted + 1):
                sim.abort(handle)
            sim.run()
            outputs.append(sim.outputs[0])
    assert len(outputs[0]) == 32 and all(output == outputs[0] for output in outputs)
    assert outputs[0] != continuation([1, 2, 3], 32)
