"""The engine's loop on a GPU: the CPU's tokens in float32, whatever way the steps are run; harmless padding; no waiting."""

import random

import pytest
import torch

from protocol.sampling import RowSampling
from tests.checkpoints import tiny_checkpoint
from tests.simulation import GREEDY, Simulation
from worker.batch import bucket_for
from worker.loading import load_model
from worker.rows import SamplingKind

pytestmark = pytest.mark.gpu

VARIANTS = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-dynamic": (
        "llama",
        {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}
GRAPHS, EAGER = {}, {"enforce_eager": True}


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request, tmp_path_factory):
    arch, overrides = VARIANTS[request.param]
    return str(tiny_checkpoint(tmp_path_factory.mktemp(request.param), arch, **overrides))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=32))


def mixed_requests(count: int = 20) -> list[tuple[list[int], int, RowSampling]]:
    """Prompts, lengths and every kind of sampling."""
    rng = random.Random(3)
    samplings = [GREEDY, RowSampling(temperature=0.9, seed=11), RowSampling(temperature=1.1, top_k=9, top_p=0.9, min_p=0.01, seed=-4)]
    return [
        ([rng.randrange(512) for _ in range(rng.randint(1, 70))], rng.randint(1, 30), samplings[i % 3]) for i in range(count)
    ]


def run(folder: str, device: str, requests, overrides=GRAPHS, **limits) -> Simulation:
    model = load_model(folder, "float32", device, 128)
    sim = Simulation(model, overrides, **{"num_rows": 16, "block_size": 16, **limits})
    for handle, (prompt, count, sampling) in enumerate(requests):
        assert sim.add(handle, prompt, count, sampling=sampling) is None
    sim.run()
    return sim


def test_logits_of_a_prompt_equal_the_cpus(folder):
    requests = mixed_requests(6)
    logits = {}
    for device in ("cpu", "cuda"):
        sim = Simulation(load_model(folder, "float32", device, 128), EAGER, num_rows=8, block_size=16)
        for handle, (prompt, count, _) in enumerate(requests):
            sim.add(handle, prompt, count)
        plan = sim.scheduler.plan()
        batch = sim.worker.executor.batch.apply(plan.delta)
        runner = sim.worker.executor.runner
        steps = getattr(runner, "others", runner)
        with torch.inference_mode():
            steps._gather(batch)
            logits[device] = steps.model.logits(batch).cpu().clone()
    assert torch.allclose(logits["cpu"], logits["cuda"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("overrides", [EAGER, GRAPHS], ids=["eager", "graphs"])
def test_tokens_equal_the_cpus_at_every_depth(folder, overrides):
    requests = mixed_requests()
    expected = run(folder, "cpu", requests, num_rows=1, max_pipeline_depth=1).outputs
    for depth, chunk in [(1, 512), (2, 32), (4, 512)]:
        assert run(folder, "cuda", requests, overrides, max_pipeline_depth=depth, max_step_tokens=chunk).outputs == expected


def test_tokens_survive_preemption(qwen3):
    requests = mixed_requests()
    expected = run(qwen3, "cpu", requests, num_rows=1).outputs
    tight = run(qwen3, "cuda", requests, GRAPHS, num_blocks=14, max_pipeline_depth=4)
    assert tight.outputs == expected and tight.scheduler.num_preemptions > 0


def test_13_requests_replay_the_16_graph(qwen3):
    limits = dict(num_rows=40, block_size=16, num_blocks=400, max_step_tokens=512)
    sim = Simulation(load_model(qwen3, "float32", "cuda", 128), **limits)
    for handle in range(13):
        sim.add(handle, [handle + 1] * 5, 20)
    replayed = []
    graphs = sim.worker.executor.runner.decode
    original = graphs.run
    graphs.run = lambda batch: (replayed.append(len(batch.rows_S)), original(batch))[1]
    sim.run()
    assert replayed and set(replayed) == {16} == {bucket_for(13, 40)}


def test_padding_changes_no_live_kv(qwen3):
    """At every batch size from 1 to 40, beside rows that sit the step out."""
    model = load_model(qwen3, "float32", "cuda", 128)
    sim = Simulation(model, num_rows=48, block_size=16, num_blocks=48 * 8)
    executor = sim.worker.executor
    for handle in range(48):
        sim.add(handle, [handle + 1] * 20, 100)
    sim.step()
    executor.batch.apply(sim.scheduler.plan().delta)
    rows = executor.batch.rows
    for count in range(1, 41):
        bucket = bucket_for(count, 48)
        chosen = torch.full((bucket,), rows.scratch_row, dtype=torch.int32, device="cuda")
        chosen[:count] = torch.randperm(48, device="cuda")[:count]
        before = [(k.clone(), v.clone()) for k, v in model.kv_pools]
        lengths, last = rows.length_R.clone(), rows.last_token_R.clone()
        executor.batch.decode_rows_B[:bucket] = chosen
        executor.runner.decode.graphs[bucket, SamplingKind.GREEDY].replay()
        written = {(int(rows.block_table_RB[r, lengths[r] // 16]), int(lengths[r] % 16)) for r in chosen[:count].tolist()}
        for (k_old, v_old), (k_new, v_new) in zip(before, model.kv_pools):
            for old, new in ((k_old, k_new), (v_old, v_new)):
                changed = (old != new).any(dim=3).any(dim=1).nonzero().tolist()
                assert {tuple(place) for place in changed if place[0] != rows.scratch_block} <= written
        assert int(rows.length_R[rows.scratch_row]) == 0
        assert torch.equal(rows.length_R[:48].sum(), lengths[:48].sum() + count)
        rows.length_R.copy_(lengths), rows.last_token_R.copy_(last)


def test_steady_decode_never_waits_for_the_device(qwen3):
    sim = Simulation(load_model(qwen3, "float32", "cuda", 128), num_rows=8, block_size=16)
    for handle, sampling in enumerate([GREEDY, RowSampling(temperature=1.0, top_k=5, seed=1)]):
        sim.add(handle, [1, 2, 3], 100, sampling=sampling)
    for _ in range(5):
        sim.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):  # block grants among them
            plan = sim.scheduler.plan()
            batch = sim.worker.executor.batch.apply(plan.delta)
            sim.worker.executor.runner.run(batch)
            sim.scheduler.in_flight.clear()
            sim.scheduler.table.num_known_R[:2] += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("seed", range(1))
def test_growing_and_shrinking_batches_equal_eager(qwen3, seed):
    rng = random.Random(seed)
    samplings = [sampling for _, _, sampling in mixed_requests(3)]
    prompts = [[rng.randrange(512) for _ in range(rng.randint(1, 40))] for _ in range(150)]
    requests = [(prompt, rng.randint(1, 60), samplings[i % 3]) for i, prompt in enumerate(prompts)]
    limits = dict(num_rows=40, num_blocks=320, max_pipeline_depth=2)
    assert run(qwen3, "cuda", requests, GRAPHS, **limits).outputs == run(qwen3, "cuda", requests, EAGER, **limits).outputs
