"""Time from a client's send to its first token, at both doors, and what of it is not the model: requests one after another.

Each request is one step. The model of choice gets a text of the same length every time, the checksum model token ids.
Prints a table for people, then one JSON line.

usage: python tests/bench/first_token.py [--model smollm2-135m] [--requests 300]
"""

import argparse
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from frontend.client import Client  # noqa: E402
from protocol.trace import Span, read_trace  # noqa: E402
from tests.bench.report import facts  # noqa: E402
from tests.engine_process import EngineProcess  # noqa: E402

WORDS = "the quick brown fox jumps over lazy dogs while seven wise owls watch from old oak trees at night".split()
WARM_UP, PAUSE_S = 20, 0.002


def prompts(model: str | None, count: int) -> list[list[int] | str]:
    """16 ids or words each."""
    rng = random.Random(0)
    return [rng.choices(range(900), k=16) if model is None else " ".join(rng.choices(WORDS, k=16)) for _ in range(count)]


class OverZmq:
    """The blocking client."""

    def __init__(self, engine: EngineProcess):
        self.client = Client(engine.address, timeout=60)

    def ask(self, prompt: list[int] | str) -> float:
        """Milliseconds to the first token."""
        given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": prompt}
        began = time.perf_counter()
        outputs = self.client.generate(**given, max_tokens=1, temperature=0.0)
        first = next(outputs)
        ms = (time.perf_counter() - began) * 1e3
        assert len([*first.token_ids, *outputs]) == 1
        return ms


class OverHttp:
    """A stream each, on one connection."""

    def __init__(self, engine: EngineProcess):
        host, port = engine.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, prompt: list[int] | str) -> float:
        """Milliseconds to the first event."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True, "return_token_ids": True}
        content = json.dumps(body).encode()
        began = time.perf_counter()
        self.socket.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
        answer = b""
        while b"data: {" not in answer:
            answer += self.socket.recv(65536)
        ms = (time.perf_counter() - began) * 1e3
        while not answer.endswith(b"0\r\n\r\n"):
            answer += self.socket.recv(65536)
        assert answer.count(b'"token_ids":[') == 1
        return ms


def device_ms(folder: str) -> list[float]:
    """Of each step, in order."""
    spans = sorted((span for span in read_trace(folder) if span.span is Span.DEVICE), key=lambda span: span.step)
    return [(span.end_ns - span.begin_ns) / 1e6 for span in spans]


def measure(model: str | None, count: int) -> dict[str, list[tuple[float, float]]]:
    """By door: milliseconds of each request, and of the device for it. The doors are asked in turn, since what else runs on the cores
    changes from minute to minute; the trace of the engine takes a tenth of a millisecond itself."""
    flags = [*(("--executor", "checksum") if model is None else ("--model", model)), "--no-enable-prefix-caching"]
    asked = prompts(model, WARM_UP + count)
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        with EngineProcess(*flags, "--trace", folder) as engine:
            doors = {"zmq": OverZmq(engine), "http": OverHttp(engine)}
            times: dict[str, list[float]] = {name: [] for name in doors}
            for prompt in asked:
                for name, door in doors.items():
                    times[name].append(door.ask(prompt))
                    time.sleep(PAUSE_S)
        device = device_ms(folder)
    assert len(device) == len(doors) * len(asked), "each request must be one step"
    return {name: list(zip(times[name], device[i :: len(doors)], strict=True))[WARM_UP:] for i, name in enumerate(doors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the checksum model")
    parser.add_argument("--requests", type=int, default=300)
    arguments = parser.parse_args()
    results = {}
    print(f"{'door':>5}{'first token p50':>17}{'model p50':>11}{'rest p50':>10}{'p90':>8}{'p99':>8}  ms")
    for door, found in measure(arguments.model, arguments.requests).items():
        whole, device = zip(*found, strict=True)
        cuts = statistics.quantiles((ms - own for ms, own in found), n=100)
        found = {"whole": statistics.median(whole), "model": statistics.median(device), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
        results[door] = found = {name: round(ms, 3) for name, ms in found.items()}
        print(f"{door:>5}{found['whole']:>17}{found['model']:>11}{found['p50']:>10}{found['p90']:>8}{found['p99']:>8}")
    print(json.dumps({"bench": "first_token", **facts(), "model": arguments.model or "checksum", "results": results}))


if __name__ == "__main__":
    main()
