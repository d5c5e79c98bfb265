"""Whether the frontends hold up the GPU: many text streams of a real engine, at one door, for several numbers of frontends.

The same requests without streaming are the engine's own pace. Random weights choose random ids, so that text is the worst there is: few
whole characters. Prints a table for people, then one JSON line.

usage: python tests/bench/text_streams.py MODEL_FOLDER [--streams 256] [--new 1000] [--frontends 1,2,4] [--flags "…"]
"""

import argparse
import json
import random
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from tests.bench.report import facts  # noqa: E402
from tests.engine_process import MODULES, EngineProcess  # noqa: E402

NUM_CLIENTS, PROMPT_TOKENS = 8, 32
DOORS = ("whole", "zmq", "http")


def engine_flags(streams: int, new: int, frontends: int) -> list[str]:
    """Room for all streams at once."""
    return shlex.split(
        f"--load-format dummy --max-num-seqs {streams} --max-model-len {PROMPT_TOKENS + new} --max-pipeline-depth 4"
        f" --no-enable-prefix-caching --frontend-workers {frontends}"
    )


def run_clients(engine: EngineProcess, door: str, streams: int, new: int, seed: int) -> list[dict]:
    """Client processes that share the streams; what each one saw."""
    command = [sys.executable, "-m", "tests.bench.text_client", door, engine.url if door == "http" else engine.address]
    share = [str(streams // NUM_CLIENTS), str(PROMPT_TOKENS), str(new)]
    clients = [
        subprocess.Popen([*command, *share, str(seed + i)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for i in range(NUM_CLIENTS)
    ]
    outputs = [client.communicate()[0] for client in clients]
    assert all(client.returncode == 0 for client in clients)
    return [json.loads(output) for output in outputs]


def frontend_seconds(engine: EngineProcess) -> float:
    """Processor time of all frontends so far."""
    children = psutil.Process(engine.process.pid).children(recursive=True)
    return sum(sum(child.cpu_times()[:2]) for child in children if MODULES["frontend"] in child.cmdline())


def measure(engine: EngineProcess, door: str, streams: int, new: int) -> dict[str, float]:
    """One run, after a short one: from the first request to the last token."""
    run_clients(engine, door, streams, 20, random.randrange(10**6))
    before = frontend_seconds(engine)
    seen = run_clients(engine, door, streams, new, random.randrange(10**6))
    seconds = max(one["last"] for one in seen) - min(one["sent"] for one in seen)
    return {
        "tokens_per_s": round(streams * new / seconds),
        "tokens_per_part": round(streams * new / sum(one["parts"] for one in seen), 2),
        "gap_p99_ms": round(statistics.median(one["gap_p99"] for one in seen) * 1e3, 2),
        "frontend_cores": round((frontend_seconds(engine) - before) / seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--new", type=int, default=1000)
    parser.add_argument("--frontends", default="1,2,4")
    parser.add_argument("--flags", default="", help="more flags for the engine")
    arguments = parser.parse_args()
    results = {}
    print(f"{'frontends':>9} {'door':>6}{'tokens/s':>10}{'tokens/part':>13}{'gap p99 ms':>12}{'cores':>7}", flush=True)
    for frontends in map(int, arguments.frontends.split(",")):
        flags = [*engine_flags(arguments.streams, arguments.new, frontends), *shlex.split(arguments.flags)]
        with EngineProcess("--model", str(arguments.model), *flags) as engine:
            for door in DOORS:
                found = results[f"{door} {frontends}"] = measure(engine, door, arguments.streams, arguments.new)
                tokens, parts, gap, cores = found.values()
                print(f"{frontends:>9} {door:>6}{tokens:>10}{parts:>13}{gap:>12}{cores:>7}", flush=True)
    print(json.dumps({"bench": "text_streams", **facts(), "streams": arguments.streams, "new": arguments.new, "results": results}))


if __name__ == "__main__":
    main()
