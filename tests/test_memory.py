"""The size of the KV pool: arithmetic over tables of numbers on the CPU, measured and filled on a GPU; lack of memory in one line."""

import gc
import logging
import re

import pytest
import torch

from protocol.config import EngineConfig
from protocol.sampling import RowSampling
from tests.checkpoints import tiny_checkpoint
from tests.simulation import GREEDY, Simulation
from worker.checksum import ChecksumModel
from worker.executor import most_tokens, rehearsed_steps
from worker.loading import load_model
from worker.memory import GIB, GRAPH_BYTES, MemoryUse, explain_out_of_memory, measure_use, num_kv_blocks

MIB = 1 << 20
# Weights 10, activations 2, graphs 0.5; others hold 1.
IDLE = MemoryUse(total=80 * GIB, free=69 * GIB, weights=10 * GIB, activations=2 * GIB, graphs=GIB // 2)
# The same beside a process that holds 50 more.
SHARED = MemoryUse(total=80 * GIB, free=19 * GIB, weights=10 * GIB, activations=2 * GIB, graphs=GIB // 2)
FULL = MemoryUse(total=80 * GIB, free=2 * GIB, weights=10 * GIB, activations=2 * GIB, graphs=GIB // 2)


class Numbers(ChecksumModel):
    """A model of which only these are asked."""

    kv_bytes_per_token = MIB // 16  # a block of 16 tokens is 1 MiB

    def __init__(self, max_model_len: int = 4096):
        self.max_model_len = max_model_len


def config(**overrides) -> EngineConfig:
    names = dict(model="", served_model_name="", run_dir="", client_address="", epoch=0)
    return EngineConfig(**{**names, "max_num_seqs": 1000, "block_size": 16, **overrides})


@pytest.mark.parametrize("use, flags, blocks", [
    (IDLE, {"gpu_memory_utilization": 0.5}, 28160),  # 27.5 GiB = 40 - 10 - 2 - 0.5
    (IDLE, {"gpu_memory_utilization": 1.0}, 68096),  # 66.5 GiB: what is free, less than the share
    (SHARED, {"gpu_memory_utilization": 0.5}, 16896),  # 16.5 GiB = 19 - 2 - 0.5
    (SHARED, {"gpu_memory_utilization": 0.25}, 7680),  # 7.5 GiB: the other's memory does not lessen the share
    (IDLE, {"kv_cache_gib": 4.0}, 4096),
    (SHARED, {"kv_cache_gib": 40.0}, 16896),  # more than the room
    (IDLE, {"max_num_seqs": 10}, 2560),  # full contexts in every row
    (IDLE, {"num_kv_blocks": 17}, 17),
    (FULL, {"num_kv_blocks": 17}, 17),
    (None, {}, 2048),
    (None, {"kv_cache_gib": 3.0}, 3072),
])  # fmt: skip
def test_the_pool_takes_what_is_left(use, flags, blocks):
    assert num_kv_blocks(config(**flags), Numbers(), use) == blocks


def test_room_and_everything_else_are_the_share():
    for utilization in (0.3, 0.5, 0.7):
        rest = IDLE.weights + IDLE.activations + IDLE.graphs
        assert IDLE.room(utilization) + rest == int(IDLE.total * utilization)
    assert SHARED.room(1.0) + SHARED.weights + SHARED.activations + SHARED.graphs + SHARED.others == SHARED.total


def test_one_line_explains_the_sum(caplog):
    with caplog.at_level(logging.INFO):
        num_kv_blocks(config(gpu_memory_utilization=0.5), Numbers(), SHARED)
    line, = (record.getMessage() for record in caplog.records)
    assert line == (
        "KV cache: 16.50 GiB in 16896 blocks of 16 tokens, 270336 tokens; room 16.50 GiB = min(share 40.00 - weights 10.00, free 19.00) "
        "- activations 2.00 - graphs 0.50; share 0.5 of 80.00 GiB, 51.00 GiB held by other processes and the CUDA context"
    )


@pytest.mark.parametrize("use, flags, said", [
    (IDLE, {"gpu_memory_utilization": 0.0001}, "room for 0 bytes: room -12.49 GiB = min(share 0.01 - weights 10.00, free 69.00)"),
    (FULL, {}, r"room -0.50 GiB = .*; raise --gpu-memory-utilization, or lower --max-num-batched-tokens"),
    (IDLE, {"kv_cache_gib": 0.0005}, "needs at least 1 of its blocks of 1048576 bytes, there is room for 536870 bytes: .*--kv-cache-gib"),
    (None, {"kv_cache_gib": 0.0005}, "there is room for 536870 bytes; raise --kv-cache-gib$"),
    (None, {"kv_cache_gib": 0.0001, "block_size": 1}, "needs at least 2 of its blocks of 65536 bytes, there is room for 107374"),
    (IDLE, {"num_kv_blocks": 80 * 1024 + 1}, "--num-kv-blocks must be at most 81920, what the memory holds, got 81921"),
])  # fmt: skip
def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(use, flags, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")) as refused:
        num_kv_blocks(config(**flags), Numbers(), use)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("max_model_len, warns", [(270336, False), (270337, True)])
def test_a_pool_smaller_than_one_context_is_told(max_model_len, warns, caplog):
    blocks = num_kv_blocks(config(gpu_memory_utilization=0.5), Numbers(max_model_len), SHARED)
    assert blocks == 16896
    assert warns == any(f"270336 tokens, less than max_model_len {max_model_len}" in message for message in caplog.messages)


@pytest.mark.parametrize("error, said", [
    (
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.25 GiB is free. "
            "Process 7 has\n77.90 GiB memory in use. If reserved but unallocated memory is large try setting X."
        ),
        "no memory for the weights: CUDA out of memory; Tried to allocate 2.50 GiB; GPU 0 has a total capacity of 79.15 GiB of which "
        "1.25 GiB is free; end what else runs",
    ),
    (
        RuntimeError("Triton Error [CUDA]: out of memory"),
        "no memory for the weights: Triton Error [CUDA]: out of memory; end what else runs",
    ),
])  # fmt: skip
def test_lack_of_memory_is_one_line(error, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"), explain_out_of_memory("the weights", "end what else runs"):
        raise error


def test_lack_of_memory_shows_through_the_end_of_a_capture():
    with pytest.raises(ValueError, match="no memory for graphs: CUDA out of memory; Tried"), explain_out_of_memory("graphs", "x"):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_other_errors_keep_their_traceback():
    error = RuntimeError("expected scalar type Float")
    with pytest.raises(RuntimeError) as raised, explain_out_of_memory("the weights", "x"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 48])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 50, 5000])
@pytest.mark.parametrize("max_model_len", [2, 64, 4096])
def test_no_step_is_larger_than_the_last_one_rehearsed(max_num_seqs, max_num_batched_tokens, max_model_len):
    limits = config(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    steps = rehearsed_steps(limits, max_model_len)
    assert all(num_seqs <= num_tokens <= most_tokens(limits) for num_tokens, num_seqs in steps)
    assert all(-(-num_tokens // num_seqs) <= max_model_len for num_tokens, num_seqs in steps)
    assert steps[-1] == tuple(map(max, zip(*steps))) or max_model_len == 2  # where n + 1 tokens of n rows are none that can come
    assert steps[-1] == (min(max_num_seqs + max_num_batched_tokens, max_num_seqs * (max_model_len - 1)), max_num_seqs)


@pytest.mark.parametrize("peak, reserved, free, activations", [
    (25, 25, 55, 15),  # all of it torch's
    (40, 25, 55, 30),  # some of that given back
    (25, 25, 52, 18),  # 3 beside torch's
    (40, 25, 52, 33),
    (25, 25, 60, 15),  # another process has ended
])  # fmt: skip
def test_activations_are_torchs_peak_and_what_torch_does_not_see(peak, reserved, free, activations, monkeypatch):
    device = dict(memory_reserved=10, max_memory_reserved=10, mem_get_info=(70, 80))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in device:
        monkeypatch.setattr(torch.cuda, name, lambda _, name=name: device[name])

    def rehearse() -> None:
        device.update(memory_reserved=reserved, max_memory_reserved=peak, mem_get_info=(free, 80))

    use = measure_use(torch.device("cuda"), rehearse, num_graphs=3)
    assert use == MemoryUse(total=80, free=70, weights=10, activations=activations, graphs=3 * GRAPH_BYTES)


def test_a_pool_takes_the_place_of_an_earlier_one(tmp_path):
    model = load_model(str(tiny_checkpoint(tmp_path)), "float32", "cpu", 64)
    model.allocate_pools(0, 4)
    model.allocate_pools(9, 4)
    pools = [pool for pair in model.kv_pools for pool in pair]
    assert len(model.kv_pools) == 2 and all(pool.shape == (10, 2, 4, 16) and pool.is_contiguous() for pool in pools)
    for value, pool in enumerate(pools, start=1):
        assert not pool.any()
        pool.fill_(value)
    assert all((pool == value).all() for value, pool in enumerate(pools, start=1))
    assert sum(pool.nbytes for pool in pools) == 10 * 4 * model.kv_bytes_per_token


# ---- on a GPU -----------------------------------------------------------------------------------------------------

# Full contexts in every row would take 32 GiB; few rows, since every bucket has kernels to compile.
LONG = {"head_dim": 32, "num_hidden_layers": 16, "max_position_embeddings": 1 << 19}
KV_BYTES = 8 << 10  # of a token
LIMITS = dict(num_rows=8, num_blocks=256, block_size=16, max_step_tokens=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("long"), "qwen3", **LONG))


@pytest.fixture
def is_alone(request) -> bool:
    """Whether no other process of pytest-xdist uses the GPU."""
    return not hasattr(request.config, "workerinput")


def on_gpu(folder: str, **overrides) -> Simulation:
    return Simulation(load_model(folder, "float32", "cuda", None), {"num_kv_blocks": None, **overrides}, **LIMITS)


def free_memory() -> tuple[int, int]:
    """Of the GPU: bytes free but for what lives, and all."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()


def outputs(sim: Simulation) -> dict[int, list[int]]:
    samplings = [GREEDY, RowSampling(temperature=0.9, seed=11), RowSampling(temperature=1.1, top_k=9, top_p=0.9, seed=-4)]
    for handle in range(12):
        assert sim.add(handle, [(7 * handle + i) % 512 for i in range(5 * handle + 1)], 10 + handle, sampling=samplings[handle % 3]) is None
    sim.run()
    return sim.outputs


@pytest.mark.gpu
def test_a_pool_sized_by_rehearsal_fills_the_share_and_serves(folder, is_alone, caplog):
    expected = outputs(Simulation(load_model(folder, "float32", "cpu", 128), **LIMITS))
    (free, total), reserved = free_memory(), torch.cuda.memory_reserved()
    with caplog.at_level(logging.INFO):
        sim = on_gpu(folder, gpu_memory_utilization=0.2)
    executor, model = sim.worker.executor, sim.worker.executor.runner.others.model
    assert model.kv_bytes_per_token == KV_BYTES
    assert len(model.kv_pools[0][0]) == executor.num_blocks + 1 and executor.batch.rows.scratch_block == executor.num_blocks
    assert outputs(sim) == expected
    torch.cuda.synchronize()
    taken, share = torch.cuda.memory_reserved() - reserved, 0.2 * total
    if is_alone:  # then what torch does not see is ours too
        taken = free - torch.cuda.mem_get_info()[0]
    print(*caplog.messages, f"{taken / GIB:.3f} GiB taken of a share of {share / GIB:.3f}", sep="\n")
    useful = LIMITS["num_rows"] * LONG["max_position_embeddings"] // LIMITS["block_size"]
    least = 0.9 if is_alone else 0.5  # what others take while we rehearse is held against us
    assert taken <= 1.03 * share and (taken >= least * share or executor.num_blocks == useful)


@pytest.mark.gpu
def test_a_share_smaller_than_the_activations_is_refused(folder):
    with pytest.raises(ValueError, match=r"there is room for 0 bytes: room -\d.*; raise --gpu-memory-utilization, or lower"):
        on_gpu(folder, gpu_memory_utilization=0.0001, enforce_eager=True)


@pytest.mark.gpu
def test_a_pool_larger_than_what_is_free_ends_in_one_line(folder):
    blocks = torch.cuda.mem_get_info()[1] // (16 * KV_BYTES)
    with pytest.raises(ValueError, match=r"no memory for a KV cache of \d.* GiB: .*Tried to allocate \d.* is free; lower --gpu") as refused:
        on_gpu(folder, num_kv_blocks=blocks, enforce_eager=True)
    assert "\n" not in str(refused.value)


@pytest.mark.gpu
def test_memory_that_is_given_back_counts_at_its_peak(is_alone):
    def rehearse() -> None:
        torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")

    _, total = free_memory()
    use = measure_use(torch.device("cuda", 0), rehearse, num_graphs=3)
    assert use.total == total and use.weights == torch.cuda.memory_reserved() - 300 * MIB
    assert use.activations >= 300 * MIB and (use.activations < 364 * MIB or not is_alone)
