"""Shared prefixes around the checksum model: a wrong, stale or foreign block shows in the next token."""

import hashlib
import random
from array import array

import pytest

from scheduler.prefix import PrefixIndex
from tests.checksum_reference import continuation
from tests.simulation import Simulation


def tokens_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(length)]


def shared_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that branch off a few stems at random places."""
    stems = [tokens_of(rng, 30) for _ in range(3)]
    return [rng.choice(stems)[: rng.randint(1, 30)] + tokens_of(rng, rng.randint(0, 6)) for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(15))
def test_random_mixes_with_shared_prefixes_give_every_request_its_own_tokens(seed, depth):
    rng = random.Random(100 * depth + seed)
    sim = Simulation(
        num_rows=rng.choice([2, 6, 16]), num_blocks=rng.choice([24, 48, 300]), block_size=rng.choice([2, 4]), max_model_len=48,
        max_step_tokens=rng.choice([3, 16, 512]), max_pipeline_depth=depth,
    )  # fmt: skip
    prompts = shared_prompts(rng, 60)
    salts = [rng.choice([b"", b"", b"other"]) for _ in prompts]
    aborted = set()
    for handle, prompt in enumerate(prompts):
        sim.add(handle, prompt, rng.randint(1, 12), salt=salts[handle])
        aborted |= sim.churn(rng, range(handle + 1), 0.2)
    sim.run()
    assert sim.scheduler.num_cached_tokens > 0
    for handle, prompt in enumerate(prompts):
        assert sim.outputs[handle] == continuation(prompt, len(sim.outputs[handle]))
        assert handle in sim.finished or handle in aborted


@pytest.mark.parametrize("bits", [0, 8])
def test_colliding_hashes_lend_nobody_foreign_blocks(bits):
    """Tokens and parents are compared on a hit, so a hash of 8 bits, or of none, costs hits and nothing else."""
    rng = random.Random(bits)
    sim = Simulation(num_rows=4, num_blocks=40, block_size=2, max_model_len=48)
    sim.scheduler.prefixes.digest = lambda data: hashlib.sha256(data).digest()[: bits // 8]
    prompts = shared_prompts(rng, 150)
    for handle, prompt in enumerate(prompts):
        sim.add(handle, prompt, 4)
        sim.step()
    sim.run()
    assert all(sim.outputs[handle] == continuation(prompt, 4) for handle, prompt in enumerate(prompts))


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
@pytest.mark.parametrize("extra", [0, 1])
def test_the_last_prompt_token_is_always_computed(num_blocks, extra):
    prompt = list(range(num_blocks * 4 + extra))
    sim = Simulation(block_size=4)
    for handle in range(3):
        sim.add(handle, prompt, 3)
        sim.run()
    for handle in (3, 4):
        sim.add(handle, prompt, 3)
    sim.run()
    expected = (len(prompt) - 1) // 4 * 4
    assert [sim.num_cached[handle] for handle in range(5)] == [0] + [expected] * 4
    assert all(sim.outputs[handle] == continuation(prompt, 3) for handle in range(5))


def test_copies_of_a_prompt_with_different_lengths_agree_while_others_churn_the_pool():
    rng = random.Random(5)
    prompt = tokens_of(rng, 20)
    sim = Simulation(num_rows=12, num_blocks=90, block_size=4, max_model_len=80)
    sim.add(0, prompt, 2)
    sim.run()
    for handle in range(1, 31):
        sim.add(handle, prompt, handle)
        sim.add(1000 + handle, tokens_of(rng, rng.randint(1, 60)), 10)
    sim.run()
    assert all(sim.outputs[handle] == continuation(prompt, handle) for handle in range(1, 31))


def test_evicted_blocks_lose_their_old_content():
    rng = random.Random(1)
    sim = Simulation(num_rows=2, num_blocks=20, block_size=4, max_model_len=40)
    prompts = [tokens_of(rng, 20) for _ in range(100)]
    for handle, prompt in enumerate(prompts):
        sim.add(handle, prompt, 2)
        sim.run()
        assert len(sim.scheduler.prefixes.entries) <= 20
    order = rng.sample(range(100), 100)
    for i, again in enumerate(order):
        sim.add(1000 + i, prompts[again], 2)
    sim.run()
    assert all(sim.outputs[1000 + i] == continuation(prompts[again], 2) for i, again in enumerate(order))


@pytest.mark.parametrize(("count", "length"), [(256, 40), pytest.param(512, 128, marks=pytest.mark.soak)])
def test_many_requests_with_one_prefix_in_a_small_pool_equal_those_without_a_cache(count, length):
    rng = random.Random(2)
    stem = tokens_of(rng, 12)
    prompts = [stem + tokens_of(rng, 5) for _ in range(count)]
    blocks = 20 * (20 + length) // 4  # for 20 of the 64 rows
    for enabled in (True, False):
        sim = Simulation(num_rows=64, num_blocks=blocks, block_size=4, max_model_len=20 + length, enable_prefix_caching=enabled)
        for handle, prompt in enumerate(prompts):
            sim.add(handle, prompt, length)
        sim.run()
        assert sim.scheduler.num_preemptions > 0
        assert all(sim.outputs[handle] == continuation(prompt, length) for handle, prompt in enumerate(prompts))
        assert (sim.scheduler.num_cached_tokens > 0) == enabled


def test_a_preempted_request_finds_its_own_blocks_again():
    sim = Simulation(num_rows=4, num_blocks=46, block_size=4, max_model_len=120)
    for handle in range(4):
        sim.add(handle, [handle] * 20, 80)
    sim.run()
    assert sim.scheduler.num_preemptions > 0 and sim.scheduler.num_cached_tokens > 0
    assert all(sim.num_cached[handle] == 0 for handle in range(4)), "what is reported is of the prompt's first admission"
    assert all(sim.outputs[handle] == continuation([handle] * 20, 80) for handle in range(4))


def test_requests_of_different_salts_share_nothing():
    sim = Simulation(block_size=4)
    for handle, salt in enumerate([b"a", b"b", b"a"]):
        sim.add(handle, list(range(21)), 2, salt=salt)
        sim.run()
    assert [sim.num_cached[handle] for handle in range(3)] == [0, 0, 20]


def test_a_conversation_finds_its_own_answer():
    sim = Simulation(block_size=4)
    prompt = list(range(10))
    sim.add(0, prompt, 20)
    sim.run()
    sim.add(1, prompt + sim.outputs[0] + [5, 6, 7], 4)
    sim.run()
    assert sim.num_cached[1] == 28  # seven full blocks of the 29 tokens whose KV was computed
    assert sim.outputs[1] == continuation(prompt + sim.outputs[0] + [5, 6, 7], 4)


def test_no_placeholder_is_ever_indexed():
    """Every indexed token was known: the index holds no token that the outputs do not confirm."""
    rng = random.Random(9)
    sim = Simulation(num_rows=6, num_blocks=400, block_size=2, max_pipeline_depth=4)
    prompts = [tokens_of(rng, rng.randint(1, 9)) for _ in range(20)]
    for handle, prompt in enumerate(prompts):
        sim.add(handle, prompt, 20, end_ids=tokens_of(rng, 40))
    sim.run()
    sequences = [prompt + sim.outputs[handle] for handle, prompt in enumerate(prompts)]
    blocks = {bytes(memoryview(array("i", s[i : i + 2]))) for s in sequences for i in range(0, len(s) - 1, 2)}
    assert {entry.tokens for entry in sim.scheduler.prefixes.entries.values()} <= blocks


def test_a_long_prompt_that_waits_is_not_hashed_in_every_step():
    sim = Simulation(num_rows=4, num_blocks=60, block_size=4, max_model_len=240)
    for handle in range(3):
        sim.add(handle, [handle] * 60, 100)
    sim.step()
    lookups = []
    find = sim.scheduler.prefixes.find
    sim.scheduler.prefixes.find = lambda tokens, salt: (lookups.append(len(tokens)), find(tokens, salt))[1]
    sim.add(3, [9] * 200, 5)
    for _ in range(50):
        sim.step()
    assert 3 not in sim.num_cached, "it must still be waiting"
    assert lookups.count(200) < 5
    sim.run()
    assert sim.outputs[3] == continuation([9] * 200, 5)


def test_the_index_stays_bounded_under_endless_new_prompts():
    sim = Simulation(num_rows=4, num_blocks=30, block_size=2, max_model_len=16)
    index = sim.scheduler.prefixes
    assert isinstance(index, PrefixIndex)
    for handle in range(2000):
        sim.add(handle, [handle % 1000, handle // 1000, handle % 7, 3, 4], 1)
        sim.step()
        assert len(index.entries) == len(index.key_of) <= 30
    sim.run()
