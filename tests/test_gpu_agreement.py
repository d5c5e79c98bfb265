"""How near to float32 a model of real shape stays in bfloat16, beside transformers; and the demo's answer on a GPU.

S = sequences, L = their tokens, V = vocabulary
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from frontend.client import Client
from protocol.messages import Chunk, RowJoin, StepDelta, pack
from tests.checkpoints import tiny_model
from tests.simulation import GREEDY, Simulation
from tests.test_gpu_engine import compile_decode_steps
from worker.executor import Executor
from worker.loading import load_model
from worker.model import TransformerModel

pytestmark = pytest.mark.gpu

QWEN3_0_6B = dict(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=True, initializer_range=0.02,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
NUM_SEQS, LENGTH = 128, 256
MOST_ROWS, MAX_MODEL_LEN, BLOCK_SIZE = 32, 512, 16
# Ways to run steps that part at two tokens must have found their logits this near, in standard deviations of all logits: bfloat16's
# error of a difference of two logits is 0.02 (measured on a CPU, transformers' model and ours alike), and a thousand are compared.
NEAR_TIE = 0.1


def write_checkpoint(folder: Path) -> None:
    """Random weights in bfloat16."""
    with torch.device("cuda"):
        tiny_model("qwen3", **QWEN3_0_6B).to(torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    compile_decode_steps(folder, "bfloat16", MOST_ROWS, MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def checkpoint(once) -> Path:
    return once("qwen3-0.6b-shape", write_checkpoint)


def reference(folder: Path, dtype: torch.dtype, **options: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).to("cuda").eval()


def our_model(folder: Path) -> TransformerModel:
    return load_model(str(folder), "bfloat16", "cuda", MAX_MODEL_LEN)


@torch.inference_mode()
def reference_choices(model: PreTrainedModel, tokens_SL: Tensor) -> Tensor:
    """The most likely next token after every token."""
    return torch.cat([model(part.to(model.device)).logits.argmax(-1).cpu() for part in tokens_SL.split(4)])


# ---- our choices after given tokens -------------------------------------------------------------------------------


def joins_of(num_rows: int) -> list[RowJoin]:
    """Rows without tokens, each with blocks of its own."""
    per_row = LENGTH // BLOCK_SIZE
    return [RowJoin(row, 0, LENGTH, 0, pack(range(row * per_row, (row + 1) * per_row)), GREEDY) for row in range(num_rows)]


def chunked_choices(executor: Executor, tokens_SL: Tensor) -> Tensor:
    """Choices of mixed steps: after the last token of chunks of one or two; -1 where no chunk ends."""
    rng, rows = random.Random(0), range(len(tokens_SL))
    choices_SL, starts = torch.full_like(tokens_SL, -1), [0 for _ in rows]
    joins, idle = joins_of(len(rows)), list(range(MOST_ROWS))
    while min(starts) < LENGTH:
        going = [row for row in rows if starts[row] < LENGTH]
        ends = [min(starts[row] + rng.randint(1, 2), LENGTH) for row in going]
        chunks = [Chunk(row, pack(tokens_SL[row, starts[row] : end].tolist()), True) for row, end in zip(going, ends)]
        delta = StepDelta(executor.batch.next_step, joins=joins, decode_off=idle, chunks=chunks)
        sampled = executor.runner.run(executor.batch.apply(delta)).tolist()
        for row, end, token in zip(going, ends, sampled, strict=True):
            choices_SL[row, end - 1], starts[row] = token, end
        joins, idle = [], []
    return choices_SL


def decoded_choices(executor: Executor, tokens_SL: Tensor) -> Tensor:
    """Choices of decode steps, from the first token on: each step is given its tokens in the place of the last one's choices."""
    S, choices_SL = len(tokens_SL), torch.full_like(tokens_SL, -1)
    changes = dict(joins=joins_of(S), decode_on=list(range(S)), decode_off=list(range(S, MOST_ROWS)))
    for position in range(LENGTH):
        batch = executor.batch.apply(StepDelta(executor.batch.next_step, **changes))
        assert batch.is_decode
        executor.batch.rows.last_token_R[:S] = tokens_SL[:, position].int().to(executor.batch.rows.last_token_R.device)
        choices_SL[:, position] = executor.runner.run(batch)[:S].cpu()
        changes = {}
    return choices_SL


def in_groups(choose, executor: Executor, tokens_SL: Tensor, num_rows: int) -> Tensor:
    """The choices for all sequences, so many at a time."""
    return torch.cat([choose(executor, part) for part in tokens_SL.split(num_rows)])


def test_the_best_token_is_float32s_at_least_as_often_as_transformers(checkpoint):
    tokens_SL = torch.randint(QWEN3_0_6B["vocab_size"], (NUM_SEQS, LENGTH), generator=torch.Generator().manual_seed(1))
    best_SL = reference_choices(reference(checkpoint, torch.float32, attn_implementation="eager"), tokens_SL)
    is_theirs_SL = reference_choices(reference(checkpoint, torch.bfloat16), tokens_SL) == best_SL
    limits = dict(num_rows=MOST_ROWS, num_blocks=MOST_ROWS * MAX_MODEL_LEN // BLOCK_SIZE, block_size=BLOCK_SIZE)
    executor = Simulation(our_model(checkpoint), **limits).worker.executor
    ours = {"prompt chunks": in_groups(chunked_choices, executor, tokens_SL, MOST_ROWS)}
    for batch, num_seqs in ((1, 8), (16, 64), (32, NUM_SEQS)):
        ours[f"decode steps of {batch}"] = in_groups(decoded_choices, executor, tokens_SL[:num_seqs], batch)
    counts = {}
    for name, choices_SL in ours.items():
        is_asked_SL, part = choices_SL >= 0, slice(len(choices_SL))
        counts[name] = [int((is_right_SL & is_asked_SL).sum()) for is_right_SL in (choices_SL == best_SL[part], is_theirs_SL[part])]
        num_asked = int(is_asked_SL.sum())
        right, theirs = (count / num_asked for count in counts[name])
        print(f"\n{name}: {right:.4%} agree with float32, transformers' bfloat16 {theirs:.4%}, of {num_asked} positions", end="")
    chunked, *decoded = counts.values()
    assert chunked[0] >= chunked[1]
    assert sum(right for right, _ in decoded) >= sum(theirs for _, theirs in decoded)


# ---- our own ways to run steps, against each other ------------------------------------------------------------------

WAYS = {  # overrides of the configuration, pipeline depth
    "op by op": ({"op_by_op": True}, 4),
    "fused, eager": ({"enforce_eager": True}, 4),
    "graphs, depth 1": ({}, 1),
    "graphs, depth 4": ({}, 4),
}


def greedy_tokens(model: TransformerModel, prompts: list[list[int]], overrides: dict, depth: int) -> list[list[int]]:
    sim = Simulation(model, overrides, num_rows=16, block_size=BLOCK_SIZE, num_blocks=512, max_step_tokens=512, max_pipeline_depth=depth)
    for handle, prompt in enumerate(prompts):
        sim.add(handle, prompt, 64)
    sim.run()
    return list(sim.outputs.values())


def partings(prompts, one, other) -> Iterator[tuple[list[int], int, int]]:
    """Of sequences that differ: what they share, and the first token of each that they do not."""
    for prompt, mine, yours in zip(prompts, one, other, strict=True):
        if mine != yours:
            shared = next(i for i, (a, b) in enumerate(zip(mine, yours, strict=True)) if a != b)
            yield prompt + mine[:shared], mine[shared], yours[shared]


@torch.inference_mode()
def gap(model: PreTrainedModel, prefix: list[int], one: int, other: int) -> float:
    """How far apart the logits of two next tokens are, in standard deviations of all logits."""
    logits_V = model(torch.tensor([prefix], device=model.device)).logits[0, -1]
    return float((logits_V[one] - logits_V[other]).abs() / logits_V.std())


def test_ways_to_run_steps_part_only_at_near_ties(checkpoint):
    rng, model = random.Random(2), our_model(checkpoint)
    prompts = [[rng.randrange(QWEN3_0_6B["vocab_size"]) for _ in range(24)] for _ in range(16)]
    tokens = {name: greedy_tokens(model, prompts, overrides, depth) for name, (overrides, depth) in WAYS.items()}
    exact = reference(checkpoint, torch.float32, attn_implementation="eager")
    for name in list(WAYS)[1:]:
        gaps = [gap(exact, *parting) for parting in partings(prompts, tokens["op by op"], tokens[name])]
        print(f"\n{name}: {len(gaps)} of {len(prompts)} sequences part from op by op, gaps up to {max(gaps, default=0.0):.4f}", end="")
        assert max(gaps, default=0.0) < NEAR_TIE


# ---- the demo -------------------------------------------------------------------------------------------------------


def test_the_demo_answer_is_the_cpus(smollm2):
    pytest.importorskip("psutil", reason="the test's engine needs psutil")
    from tests.engine_process import EngineProcess

    answers = []
    for device in ("cpu", "cuda"):
        flags = ("--device", device, "--dtype", "float32", "--max-num-seqs", "1", "--max-model-len", "512", "--no-tune-kernels")
        with EngineProcess("--model", str(smollm2), *flags) as engine, Client(engine.address, timeout=100) as client:
            question = [{"role": "user", "content": "What is the capital of France?"}]
            answers.append(client.complete(messages=question, temperature=0.0, max_tokens=48, ignore_eos=True))
    assert answers[1].token_ids == answers[0].token_ids and len(answers[0].token_ids) == 48
    assert answers[1].text.startswith("The capital of France is Paris.")
