"""One mixed step and one decode step of each kind of kernel, to be run under NVIDIA's compute-sanitizer. Needs a GPU.

A model of Qwen3-0.6B's widths with few layers and tokens, random weights, bfloat16, the first candidates, dependent launches, no
graphs. Run it once without the sanitizer, so that no kernel is compiled under it.

usage: compute-sanitizer --tool memcheck|racecheck|synccheck python tests/sanitize_decode.py [--batches 1,16,40,64]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from kernels import ops  # noqa: E402
from kernels import rows as row_ops  # noqa: E402
from protocol.messages import Chunk, RowJoin, StepDelta, pack  # noqa: E402
from protocol.sampling import RowSampling  # noqa: E402
from worker.batch import PersistentBatch  # noqa: E402
from worker.decode import DecodeChain  # noqa: E402
from worker.graphs import EagerDecode, GraphRunner  # noqa: E402
from worker.loading import load_model  # noqa: E402
from worker.model import TransformerModel  # noqa: E402
from worker.rows import RowState  # noqa: E402
from worker.runner import StepRunner  # noqa: E402
from worker.staging import PinnedStaging  # noqa: E402
from worker.tuning import plan_buckets  # noqa: E402

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "vocab_size": 2048, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
MAX_MODEL_LEN, BLOCK_SIZE = 256, 16
BLOCKS_PER_ROW = 8
MOST_PROMPT = 100
# Chance in every other batch: its kernels are others, and each takes seconds to compile.
SAMPLINGS = (RowSampling(), RowSampling(temperature=0.8, seed=7))


class Steps:
    """Mixed steps op by op and decode steps kernel by kernel, over rows that join as one batch after the other."""

    def __init__(self, model: TransformerModel, batches: list[int]):
        most, num_blocks = max(batches), max(batches) * BLOCKS_PER_ROW
        max_tokens = most * MOST_PROMPT
        model.allocate_pools(num_blocks, BLOCK_SIZE)
        model.allocate_buffers(max_tokens, most)
        self.model, self.most = model, most
        self.rows = RowState(most, MAX_MODEL_LEN // BLOCK_SIZE, num_blocks, model.device)
        self.batch = PersistentBatch(self.rows, max_tokens, PinnedStaging(model.device, 1, 100 * (max_tokens + num_blocks)))
        plans = plan_buckets(model, batches, model.vocab_size, None, tune=False)
        self.chain = DecodeChain(model, self.rows, model.vocab_size, plans, pdl=True)
        others = StepRunner(model, ops, row_ops, self.rows, BLOCK_SIZE, model.vocab_size)
        self.runner = GraphRunner(EagerDecode(self.chain), others)

    def run(self, count: int, sampling: RowSampling) -> None:
        """Prompts of `count` rows in one mixed step, then a decode step. Asserts that every result is finite."""
        lengths = [5 + 37 * row % (MOST_PROMPT - 5) for row in range(count)]
        blocks = [pack(range(row * BLOCKS_PER_ROW, (row + 1) * BLOCKS_PER_ROW)) for row in range(count)]
        joins = [RowJoin(row, 0, lengths[row], 0, blocks[row], sampling) for row in range(count)]
        chunks = [Chunk(row, pack([(7 * row + i) % self.model.vocab_size for i in range(lengths[row])]), True) for row in range(count)]
        self._step(count, joins=joins, decode_off=list(range(self.most)), chunks=chunks)
        self._step(count, decode_on=list(range(count)))
        assert self.chain.x_BD[:count].isfinite().all()
        assert self.rows.length_R[:count].tolist() == [length + 1 for length in lengths]
        assert all(pool.isfinite().all() for pools in self.model.kv_pools for pool in pools)
        plan = self.chain.plans[count]
        print(f"batch {count}: {sum(lengths)} prompt tokens, then {plan.configs}, {plan.attention}, head {plan.head}", flush=True)

    def _step(self, count: int, **changes: object) -> None:
        batch = self.batch.apply(StepDelta(self.batch.next_step, **changes))
        sampled = self.runner.run(batch)[:count].tolist()
        assert all(0 <= token < self.model.vocab_size for token in sampled), sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,16,40,64")
    batches = [int(batch) for batch in parser.parse_args().batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        model = load_model(folder, "bfloat16", "cuda", MAX_MODEL_LEN, "dummy")
    steps = Steps(model, batches)
    for i, batch in enumerate(batches):
        steps.run(batch, SAMPLINGS[i % 2])
    torch.cuda.synchronize()
    print("every result is finite")


if __name__ == "__main__":
    main()
