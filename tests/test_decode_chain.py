"""The chain of fused kernels against the plain ops, step by step over the same row state: interpreted on the CPU where there is no GPU."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from kernels import reference, reference_rows
from protocol.messages import Chunk, RowJoin, StepDelta, pack
from protocol.sampling import RowSampling
from tests.checkpoints import tiny_checkpoint
from worker.batch import PersistentBatch
from worker.decode import DecodeChain
from worker.graphs import DecodeGraphs
from worker.loading import load_model
from worker.model import TransformerModel
from worker.parameters import ModelWeights, fold_norms
from worker.rows import RowState
from worker.runner import StepRunner
from worker.staging import HostStaging
from worker.tuning import plan_buckets

NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE = 2, 16, 8
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
VARIANTS = {
    "qwen3": ("qwen3", {"head_dim": 32}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
}


class Side:
    """One model over its own rows."""

    def __init__(self, folder: Path, is_fused: bool):
        self.model = load_model(str(folder), "float32", "cpu", 64)
        if is_fused:
            as_on_gpu(self.model)
        self.model.allocate_pools(NUM_BLOCKS, BLOCK_SIZE)
        self.model.allocate_buffers(max_tokens=64, max_samples=NUM_ROWS)
        self.rows = RowState(NUM_ROWS, 8, NUM_BLOCKS, torch.device("cpu"))
        self.batch = PersistentBatch(self.rows, 64, HostStaging())
        self.plain = StepRunner(self.model, reference, reference_rows, self.rows, BLOCK_SIZE, self.model.vocab_size)


def as_on_gpu(model: TransformerModel) -> None:
    """Weights in row order and norms folded, as on a GPU."""

    def in_rows(struct):
        tensors = {field.name: getattr(struct, field.name) for field in fields(struct)}
        return replace(struct, **{name: t.contiguous() for name, t in tensors.items() if isinstance(t, torch.Tensor)})

    weights: ModelWeights = in_rows(model.weights)
    model.weights = fold_norms(replace(weights, layers=[in_rows(layer) for layer in weights.layers]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chain_samples_what_the_plain_ops_do(variant, tmp_path):
    arch, overrides = VARIANTS[variant]
    overrides = {"vocab_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 64, **overrides}
    folder = tiny_checkpoint(tmp_path, arch, **overrides)
    plain, fused = Side(folder, is_fused=False), Side(folder, is_fused=True)
    plans = plan_buckets(fused.model, [2], fused.model.vocab_size, None, tune=False)
    chain = DecodeChain(fused.model, fused.rows, fused.model.vocab_size, plans, pdl=False)
    samplings = [RowSampling(), RowSampling(temperature=0.8, seed=7)]
    joins = [RowJoin(row, row + 1, 5 + row, 0, pack([row * 3, row * 3 + 1]), samplings[row]) for row in range(2)]
    chunks = [Chunk(row, pack([7 * row + i for i in range(5 + row)]), True) for row in range(2)]
    prompt = StepDelta(0, joins=joins, chunks=chunks)
    for side in (plain, fused):
        side.plain.run(side.batch.apply(prompt))
    for step in range(1, 4):
        delta = StepDelta(step, decode_on=[0, 1] if step == 1 else [])
        expected = plain.plain.run(plain.batch.apply(delta)).tolist()
        batch = fused.batch.apply(delta)
        assert chain.run(batch.rows_S, batch.kind).tolist() == expected
        assert torch.equal(plain.rows.length_R, fused.rows.length_R)
    for (k_plain, v_plain), (k_fused, v_fused) in zip(plain.model.kv_pools, fused.model.kv_pools):
        assert torch.allclose(k_plain[:NUM_BLOCKS], k_fused[:NUM_BLOCKS], atol=1e-5)
        assert torch.allclose(v_plain[:NUM_BLOCKS], v_fused[:NUM_BLOCKS], atol=1e-5)


def test_graphs_refuse_ops_that_read_a_steps_values_on_the_host(tmp_path):
    side = Side(tiny_checkpoint(tmp_path, "qwen3", vocab_size=64, num_hidden_layers=1), is_fused=True)
    plans = plan_buckets(side.model, [2], side.model.vocab_size, None, tune=False)
    chain = DecodeChain(side.model, side.rows, side.model.vocab_size, plans, pdl=False)
    with pytest.raises(ValueError, match="kernels.reference reads a step's values on the host.*--enforce-eager"):
        DecodeGraphs(chain, side.batch.decode_rows_B)
