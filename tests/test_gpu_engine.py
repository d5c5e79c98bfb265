"""The engine's loop on a GPU: the CPU's tokens in float32, whatever way the steps are run; harmless padding; no waiting."""

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from protocol.config import EngineConfig, save_config
from protocol.messages import Swap, pack
from protocol.sampling import RowSampling
from tests.checkpoints import tiny_checkpoint
from tests.simulation import GREEDY, Simulation
from worker.batch import bucket_for
from worker.loading import load_model
from worker.precompile import compile_ahead
from worker.rows import SamplingKind
from worker.swap import AT_ONCE

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
GRAPHS, EAGER, OP_BY_OP = {}, {"enforce_eager": True}, {"op_by_op": True}
MAX_MODEL_LEN = 128
MOST_ROWS = 48  # of any test of the model `qwen3`
SAMPLINGS = [GREEDY, RowSampling(temperature=0.9, seed=11), RowSampling(temperature=1.1, top_k=9, top_p=0.9, min_p=0.01, seed=-4)]


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request, tmp_path_factory):
    arch, overrides = VARIANTS[request.param]
    return str(tiny_checkpoint(tmp_path_factory.mktemp(request.param), arch, **overrides))


def compile_decode_steps(model: Path, dtype: str, most_rows: int, max_model_len: int) -> None:
    """Compile the kernels of all of a model's decode steps in many processes: one test would take minutes."""
    run_dir = model / "run"
    run_dir.mkdir()
    config = EngineConfig(
        model=str(model), served_model_name="", run_dir=str(run_dir), client_address="", epoch=0, device="cuda", dtype=dtype,
        max_model_len=max_model_len, max_num_seqs=most_rows, tune_kernels=False,
    )  # fmt: skip
    compile_ahead(save_config(config), tokenizer_size=0)


def write_qwen3(folder: Path) -> None:
    tiny_checkpoint(folder, "qwen3", head_dim=32)
    compile_decode_steps(folder, "float32", MOST_ROWS, MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def qwen3(once):
    return str(once("qwen3", write_qwen3))


def mixed_requests(count: int = 20) -> list[tuple[list[int], int, RowSampling]]:
    """Prompts, lengths and every kind of sampling."""
    rng = random.Random(3)
    return [
        ([rng.randrange(512) for _ in range(rng.randint(1, 70))], rng.randint(1, 30), SAMPLINGS[i % 3]) for i in range(count)
    ]


def simulation(folder: str, device: str, overrides=GRAPHS, **limits) -> Simulation:
    model = load_model(folder, "float32", device, MAX_MODEL_LEN)
    return Simulation(model, overrides, **{"num_rows": 16, "block_size": 16, **limits})


def run(folder: str, device: str, requests, overrides=GRAPHS, **limits) -> Simulation:
    sim = simulation(folder, device, overrides, **limits)
    for handle, (prompt, count, sampling) in enumerate(requests):
        assert sim.add(handle, prompt, count, sampling=sampling) is None
    sim.run()
    return sim


def record_buckets(sim: Simulation) -> list[int]:
    """A list that gets the bucket of every decode step."""
    buckets, decode = [], sim.worker.executor.runner.decode
    decode.run = lambda batch, run=decode.run: (buckets.append(len(batch.rows_S)), run(batch))[1]
    return buckets


def plain_logits(runner, batch) -> Tensor:
    """What the ops compute one by one."""
    with torch.inference_mode():
        runner._gather(batch)
        return runner.model.logits(batch).cpu().clone()


def chain_logits(runner, batch) -> Tensor:
    """What the kernels of a decode step compute, and the head in full."""
    with torch.inference_mode():
        return runner.others.model.head(runner.decode.chain.hidden(batch.rows_S)).cpu().clone()


def test_logits_of_prompts_and_of_decode_steps_equal_the_cpus(folder):
    sims = [simulation(folder, device, EAGER, num_rows=8, max_step_tokens=512) for device in ("cpu", "cuda")]
    executors, scheduler = [sim.worker.executor for sim in sims], sims[0].scheduler
    prompts = [prompt for prompt, _, _ in mixed_requests(6)]
    for handle, prompt in enumerate(prompts):
        sims[0].add(handle, prompt, 10)
    for step in range(4):
        delta = scheduler.plan().delta
        batches = [executor.batch.apply(delta) for executor in executors]
        assert batches[0].is_decode == (step > 0) and batches[0].num_results == len(prompts)
        on_gpu = partial(chain_logits, executors[1].runner) if step else partial(plain_logits, executors[1].runner.others)
        expected_NV, logits_NV = plain_logits(executors[0].runner, batches[0]), on_gpu(batches[1])
        assert torch.allclose(expected_NV[: len(prompts)], logits_NV[: len(prompts)], atol=1e-4, rtol=1e-4)
        sampled = [executor.runner.run(batch)[: len(prompts)].tolist() for executor, batch in zip(executors, batches)]
        assert sampled[0] == sampled[1]


def test_tokens_equal_the_cpus_in_every_way_at_every_depth(folder):
    requests = mixed_requests()
    expected = run(folder, "cpu", requests, num_rows=1, max_pipeline_depth=1).outputs
    for overrides in (OP_BY_OP, EAGER, GRAPHS):
        for depth, chunk in [(1, 512), (2, 32), (3, 64), (4, 512)]:
            limits = dict(num_rows=4, max_pipeline_depth=depth, max_step_tokens=chunk)
            assert run(folder, "cuda", requests, overrides, **limits).outputs == expected, (overrides, depth)


def test_tokens_of_larger_batches_equal_the_cpus_in_every_way(qwen3):
    requests = mixed_requests(60)
    expected = run(qwen3, "cpu", requests, num_rows=1).outputs
    for overrides, depth in [(OP_BY_OP, 2), (EAGER, 4), (GRAPHS, 1), (GRAPHS, 4)]:
        sim = run(qwen3, "cuda", requests, overrides, num_rows=40, max_pipeline_depth=depth, max_step_tokens=200)
        assert sim.outputs == expected, (overrides, depth)


def test_tokens_survive_preemption(qwen3):
    """The pool holds little more than one context, and each of the rows that start together grows by blocks of it."""
    requests = [(prompt[:20], 40, sampling) for prompt, _, sampling in mixed_requests()]
    expected = run(qwen3, "cpu", requests, num_rows=1).outputs
    for num_places in (0, 100):
        tight = run(qwen3, "cuda", requests, GRAPHS, num_blocks=10, max_pipeline_depth=4, num_host_blocks=num_places)
        assert tight.outputs == expected and tight.scheduler.num_preemptions > 0
        assert (tight.scheduler.swap.num_in > 0) == (num_places > 0)


def test_swaps_never_wait_for_the_device(qwen3):
    sim = simulation(qwen3, "cuda", num_rows=8, num_blocks=40, num_host_blocks=40)
    swapper, ids = sim.worker.executor.batch.swapper, pack(range(AT_ONCE + 4))
    swapper.kv_CP.normal_()
    before = swapper.kv_CP.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        swapper.run([Swap(True, ids, ids)])
        swapper.kv_CP.zero_()  # launched like a step, right after
        swapper.run([Swap(False, ids, ids)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(swapper.kv_CP[:, : AT_ONCE + 4], before[:, : AT_ONCE + 4])


def test_13_requests_replay_the_16_graph(qwen3):
    sim = simulation(qwen3, "cuda", num_rows=40, num_blocks=400, max_step_tokens=512)
    for handle in range(13):
        sim.add(handle, [handle + 1] * 5, 20)
    replayed = record_buckets(sim)
    sim.run()
    assert replayed and set(replayed) == {16} == {bucket_for(13, 40)}


def test_padding_changes_no_live_kv(qwen3):
    """Byte for byte, at every batch size from 1 to 40, beside rows that sit the step out."""
    sim = simulation(qwen3, "cuda", num_rows=48, num_blocks=48 * 8, max_step_tokens=1024)
    executor = sim.worker.executor
    kv_pools = executor.runner.others.model.kv_pools
    for handle in range(48):
        sim.add(handle, [handle + 1] * 20, 100)
    sim.step()
    executor.batch.apply(sim.scheduler.plan().delta)
    rows = executor.batch.rows
    for count in range(1, 41):
        bucket = bucket_for(count, 48)
        chosen = torch.full((bucket,), rows.scratch_row, dtype=torch.int32, device="cuda")
        chosen[:count] = torch.randperm(48, device="cuda")[:count]
        before = [(k.clone(), v.clone()) for k, v in kv_pools]
        lengths, last = rows.length_R.clone(), rows.last_token_R.clone()
        executor.batch.decode_rows_B[:bucket] = chosen
        executor.runner.decode.graphs[bucket, SamplingKind.GREEDY].replay()
        written = {(int(rows.block_table_RB[r, lengths[r] // 16]), int(lengths[r] % 16)) for r in chosen[:count].tolist()}
        for (k_old, v_old), (k_new, v_new) in zip(before, kv_pools):
            for old, new in ((k_old, k_new), (v_old, v_new)):
                changed = (old.view(torch.int32) != new.view(torch.int32)).any(dim=3).any(dim=1).nonzero().tolist()
                assert {tuple(place) for place in changed if place[0] != rows.scratch_block} <= written
        assert int(rows.length_R[rows.scratch_row]) == 0
        assert torch.equal(rows.length_R[:48].sum(), lengths[:48].sum() + count)
        rows.length_R.copy_(lengths), rows.last_token_R.copy_(last)


def test_steady_decode_never_waits_for_the_device(qwen3):
    sim = simulation(qwen3, "cuda", num_rows=8)
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


def test_requests_that_join_never_wait_for_the_device(qwen3):
    sim = simulation(qwen3, "cuda", num_rows=8)
    for wave in range(2):  # the first one compiles
        for i, sampling in enumerate(SAMPLINGS):
            sim.add(3 * wave + i, [1, 2, 3 + i] * 7, 30, sampling=sampling)
        if wave == 0:
            sim.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            plan = sim.scheduler.plan()
            batch = sim.worker.executor.batch.apply(plan.delta)
            assert batch.is_decode == (len(sim.scheduler.in_flight) > 1)
            sim.worker.executor.runner.run(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_bursts(folder: str, overrides: dict, num_steps: int) -> tuple[Simulation, list[int]]:
    """Requests that come in bursts, until so many decode steps are run: the simulation, and the bucket of each step."""
    sim = simulation(folder, "cuda", overrides, num_rows=40, num_blocks=320, max_step_tokens=1000)
    rng, buckets = random.Random(0), record_buckets(sim)
    while len(buckets) < num_steps:
        if not sim.step() or rng.random() < 0.02:
            first, sampling = len(sim.outputs), rng.choice(SAMPLINGS)
            for handle in range(first, first + rng.randint(1, 45)):
                sim.add(handle, [rng.randrange(512) for _ in range(rng.randint(1, 40))], rng.randint(1, 60), sampling=sampling)
    sim.run()
    return sim, buckets


@pytest.mark.parametrize("num_steps", [600, pytest.param(10_000, marks=pytest.mark.soak)])
def test_growing_and_shrinking_batches_equal_eager(qwen3, num_steps):
    (graphs, graph_buckets), (eager, eager_buckets) = (run_bursts(qwen3, overrides, num_steps) for overrides in (GRAPHS, EAGER))
    changes = sum(one != other for one, other in zip(graph_buckets, graph_buckets[1:]))
    print(f"\n{len(graph_buckets)} decode steps, {changes} changes of the bucket, {len(graphs.outputs)} requests")
    assert graph_buckets == eager_buckets and len(graph_buckets) >= num_steps
    assert set(graph_buckets) == {bucket_for(count, 40) for count in range(1, 41)}
    assert graphs.outputs == eager.outputs
