"""Time from a client's send to its first token, at both doors, and what of it is not the model: requests one after another.

Each request is one step, whose time on the device the engine's trace has. The model of choice gets a text of the same length every time,
the checksum model token ids. Prints a table for people, then one JSON line.

usage: python tests/bench/first_token.py [--model smollm2-135m] [--requests 300]
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from frontend.client import Client  # noqa: E402
from protocol.trace import Span, read_trace  # noqa: E402
from tests.bench.report import facts  # noqa: E402
from tests.engine_process import EngineProcess  # noqa: E402

WORDS = "the quick brown fox jumps over lazy dogs while seven wise owls watch from old oak trees at night".split()
WARM_UP, PAUSE_S = 20, 0.002
Ask = Callable[[list[int] | str], Callable[[], object]]  # returns with the first token; what it returns reads the rest


def prompts(model: str | None, count: int) -> list[list[int] | str]:
    """16 ids or words each."""
    rng = random.Random(0)
    return [rng.choices(range(900), k=16) if model is None else " ".join(rng.choices(WORDS, k=16)) for _ in range(count)]


def time_requests(ask: Ask, asked: list[list[int] | str]) -> list[float]:
    """Milliseconds to each first token; the rest of an answer is read before the next request."""
    times = []
    for prompt in asked:
        began = time.perf_counter()
        rest = ask(prompt)
        times.append((time.perf_counter() - began) * 1e3)
        rest()
        time.sleep(PAUSE_S)
    return times


def over_zmq(address: str, asked: list[list[int] | str]) -> list[float]:
    """Through the blocking client."""
    with Client(address, timeout=60) as client:

        def ask(prompt: list[int] | str) -> Callable[[], object]:
            given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": prompt}
            outputs = client.generate(**given, max_tokens=1, temperature=0.0)
            assert len(next(outputs).token_ids) == 1
            return lambda: list(outputs)

        return time_requests(ask, asked)


def over_http(url: str, asked: list[list[int] | str]) -> list[float]:
    """A stream each, on one connection."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=60)

    def ask(prompt: list[int] | str) -> Callable[[], object]:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True, "return_token_ids": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        first = json.loads(response.readline().removeprefix(b"data: "))
        assert len(first["choices"][0]["token_ids"]) == 1
        return response.read

    times = time_requests(ask, asked)
    connection.close()
    return times


def device_ms(folder: str) -> list[float]:
    """Of each step, in order."""
    spans = sorted((span for span in read_trace(folder) if span.span is Span.DEVICE), key=lambda span: span.step)
    return [(span.end_ns - span.begin_ns) / 1e6 for span in spans]


def measure(model: str | None, count: int) -> dict[str, tuple[list[float], list[float]]]:
    """By door: the times, and the device's own."""
    flags = ("--executor", "checksum") if model is None else ("--model", model)
    asked = prompts(model, WARM_UP + count)
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        with EngineProcess(*flags, "--no-enable-prefix-caching", "--trace", folder) as engine:
            zmq = over_zmq(engine.address, asked)
            http = over_http(engine.url, asked)
        device = device_ms(folder)
    assert len(device) == 2 * len(asked), "each request must be one step"
    kept = slice(WARM_UP, None)
    return {"zmq": (zmq[kept], device[: len(asked)][kept]), "http": (http[kept], device[len(asked) :][kept])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the checksum model")
    parser.add_argument("--requests", type=int, default=300)
    arguments = parser.parse_args()
    results = {}
    print(f"{'door':>5}{'first token p50':>17}{'model p50':>11}{'rest p50':>10}{'p90':>8}{'p99':>8}  ms")
    for door, (whole, device) in measure(arguments.model, arguments.requests).items():
        rest = [one - own for one, own in zip(whole, device, strict=True)]
        cuts = statistics.quantiles(rest, n=100)
        found = {"whole": statistics.median(whole), "model": statistics.median(device), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
        results[door] = found = {name: round(ms, 3) for name, ms in found.items()}
        print(f"{door:>5}{found['whole']:>17}{found['model']:>11}{found['p50']:>10}{found['p90']:>8}{found['p99']:>8}")
    print(json.dumps({"bench": "first_token", **facts(), "model": arguments.model or "checksum", "results": results}))


if __name__ == "__main__":
    main()
