"""Tokens per second of many streams of the checksum model through the real processes: what frontend, scheduler and channels can carry.

The model costs next to nothing, so the host's work is all there is. Every token is checked by its client; two client processes share
the streams, and the cores with the engine. Prints a table for people, then one JSON line.

usage: python tests/bench/streams.py [--streams 64,256] [--new 200] [--repeats 5] [--depth 4]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.report import facts, quantiles  # noqa: E402
from tests.engine_process import EngineProcess  # noqa: E402

NUM_CLIENTS, PROMPT_TOKENS, WARM_UP_TOKENS = 2, 16, 20


def engine_flags(streams: int, new: int, depth: int) -> list[str]:
    """Room for all streams at once."""
    flags = {
        "executor": "checksum", "num-threads": 1, "max-num-seqs": streams, "max-model-len": PROMPT_TOKENS + new,
        "num-kv-blocks": streams * -(-(PROMPT_TOKENS + new) // 16), "max-pipeline-depth": depth, "max-queued-requests": 2 * streams,
    }  # fmt: skip
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def run_streams(address: str, seed: int, streams: int, new: int) -> float:
    """Tokens per second, from the first request to the last token."""
    share = str(streams // NUM_CLIENTS)
    command = [sys.executable, "-m", "tests.stream_clients", address]
    clients = [
        subprocess.Popen([*command, str(seed + i), share, str(PROMPT_TOKENS), str(new)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for i in range(NUM_CLIENTS)
    ]
    outputs = [client.communicate()[0] for client in clients]
    assert all(client.returncode == 0 for client in clients)
    reports = [json.loads(output) for output in outputs]
    return sum(report["tokens"] for report in reports) / max(report["seconds"] for report in reports)


def measure(streams: int, new: int, repeats: int, depth: int) -> list[float]:
    """Tokens per second of each repeat, with prompts of its own, after a short one."""
    with EngineProcess(*engine_flags(streams, new, depth)) as engine:
        run_streams(engine.address, 1_000_000, streams, WARM_UP_TOKENS)
        return [run_streams(engine.address, 100 * repeat, streams, new) for repeat in range(repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="64,256", help="even numbers")
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--depth", type=int, default=4)
    arguments = parser.parse_args()
    results = {}
    print(f"{'streams':>10}{'tokens/s p20':>16}{'p50':>10}{'p80':>10}")
    for streams in map(int, arguments.streams.split(",")):
        results[streams] = quantiles(measure(streams, arguments.new, arguments.repeats, arguments.depth), 0)
        print(f"{streams:>10}{results[streams]['p20']:>16.0f}{results[streams]['p50']:>10.0f}{results[streams]['p80']:>10.0f}")
    print(json.dumps({"bench": "streams", **facts(), "new": arguments.new, "depth": arguments.depth, "results": results}))


if __name__ == "__main__":
    main()
