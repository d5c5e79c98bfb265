"""The time of a decode step, end to end through all processes and one ZMQ client, beside the floor and, where it is installed, vLLM.

Prompts of 128 random tokens, greedy, ends ignored, random weights. A step's time is the time for 257 new tokens less the time for
one, over 256; median of the repeats. Prints a table for people, then one JSON line.

usage: python tests/bench/decode.py MODEL_FOLDER [--batches 1,16,64,256] [--flags "--enforce-eager"] [--peer]
"""

import argparse
import asyncio
import json
import random
import shlex
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from frontend.client import AsyncClient  # noqa: E402
from tests.bench.floors import floor_ms  # noqa: E402
from tests.bench.report import facts, quantiles  # noqa: E402
from tests.engine_process import EngineProcess  # noqa: E402

PROMPT_TOKENS, NEW_TOKENS = 128, 257
FLAGS = shlex.split(
    "--load-format dummy --max-num-seqs 256 --max-model-len 8192 --max-num-batched-tokens 8192 --max-pipeline-depth 4"
    " --no-enable-prefix-caching"  # every repeat sends the same prompts
)


async def generate(client: AsyncClient, prompts: list[list[int]], new: int) -> float:
    """Seconds until every prompt has its new tokens."""
    options = dict(temperature=0.0, max_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    answers = await asyncio.gather(*(client.complete(prompt_ids=prompt, **options) for prompt in prompts))
    seconds = time.perf_counter() - began
    assert all(len(answer.token_ids) == new for answer in answers)
    return seconds


async def measure(address: str, batches: list[int], vocab: int, repeats: int) -> dict[int, list[float]]:
    """Milliseconds of a step for each batch size, one figure for each repeat."""
    rng = random.Random(0)
    steps: dict[int, list[float]] = {}
    async with AsyncClient(address, timeout=300) as client:
        for batch in batches:
            prompts = [[rng.randrange(1000, vocab - 1000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
            await generate(client, prompts, 16)
            steps[batch] = []
            for _ in range(repeats):
                short, long = await generate(client, prompts, 1), await generate(client, prompts, NEW_TOKENS)
                steps[batch].append((long - short) / (NEW_TOKENS - 1) * 1e3)
            print(f"batch {batch}: {[round(ms, 4) for ms in steps[batch]]} ms a step", file=sys.stderr, flush=True)
    return steps


def run_engine(model: Path, batches: list[int], flags: list[str], repeats: int) -> dict[int, list[float]]:
    """Measure a fresh engine."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    engine = EngineProcess("--model", str(model), *FLAGS, *flags)
    try:
        engine.wait_ready()
        steps = asyncio.run(measure(engine.address, batches, vocab, repeats))
        engine.stop(timeout_s=30)
        return steps
    finally:
        log = engine.errors()
        print(log[-3000:], file=sys.stderr)
        engine.kill_all()


def run_peer(model: Path, batches: list[int]) -> dict[str, dict[int, float]]:
    """vLLM's milliseconds a step, with its engine in the caller's process and in one of its own."""
    script = str(ROOT / "tests" / "bench" / "peer_vllm.py")
    found: dict[str, dict[int, float]] = {}
    for mode in ("in-process", "default"):
        command = [sys.executable, script, str(model), "--batches", ",".join(map(str, batches)), "--mode", mode]
        output = subprocess.run(command, capture_output=True, text=True)
        lines = [json.loads(line) for line in output.stdout.splitlines() if line.startswith('{"peer"')]
        found[mode] = {line["batch"]: line["step_ms"] for line in lines}
        if not found[mode]:
            print(output.stderr[-2000:], file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--flags", default="", help="more flags for the engine")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", action="store_true", help="measure vLLM too, in the same run")
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    ours = run_engine(arguments.model, batches, shlex.split(arguments.flags), arguments.repeats)
    peer = run_peer(arguments.model, batches) if arguments.peer and find_spec("vllm") else {}

    print(f"{'batch':>6}{'step ms':>10}{'tokens/s':>10}{'floor ms':>10}{'share':>8}" + "".join(f"{mode:>14}" for mode in peer) + "   ratio")
    results = {}
    for batch in batches:
        step, floor = quantiles(ours[batch], 4), floor_ms(arguments.model, batch, PROMPT_TOKENS + NEW_TOKENS // 2)
        theirs = {mode: times[batch] for mode, times in peer.items() if batch in times}
        ratio = round(min(theirs.values()) / step["p50"], 2) if theirs else None
        results[batch] = {"step_ms": step, "floor_ms": round(floor, 4), "peer_ms": theirs, "ratio": ratio}
        row = f"{batch:>6}{step['p50']:>10.3f}{batch / step['p50'] * 1e3:>10.0f}{floor:>10.3f}{floor / step['p50']:>8.1%}"
        print(row + "".join(f"{ms:>14.3f}" for ms in theirs.values()) + f"   {ratio or ''}")
    print(json.dumps({"bench": "decode", "model": arguments.model.name, **facts(), "flags": arguments.flags, "results": results}))


if __name__ == "__main__":
    main()
