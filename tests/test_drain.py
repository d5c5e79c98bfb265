"""How the HTTP door ends: requests are let finish for a while, told of the end otherwise, and no broken answer looks whole."""

import json
import os
import re
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from frontend.client import Client, EngineError
from tests.checksum_reference import continuation
from tests.engine_process import EngineProcess
from tests.scripted_scheduler import wait_until
from tests.test_checksum_engine import FLAGS

ENDLESS, SECONDS_LONG = 90_000, 6000  # tokens
ROOM = ("--max-model-len", "100000", "--num-kv-blocks", "100000")


def ask(url: str, prompt: int, max_tokens: int, stream: bool) -> tuple[int, list[dict], bool]:
    """The status, the events or the whole answer, and whether the stream had its end."""
    body = {"prompt": [prompt], "max_tokens": max_tokens, "stream": stream, "temperature": 0, "return_token_ids": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    if not response.headers["content-type"].startswith("text/event-stream"):
        assert response.headers.get("x-should-retry") == {200: None, 500: "false", 503: "true"}[response.status_code]
        return response.status_code, [response.json()], True
    frames = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    return response.status_code, [json.loads(frame) for frame in frames if frame != "[DONE]"], frames[-1] == "[DONE]"


@contextmanager
def busy_engine(*flags: str, max_tokens: int, count: int = 4):
    """An engine with so many requests running, every other one streamed, and what will come of each."""
    engine = EngineProcess(*FLAGS, *ROOM, *flags)
    try:
        engine.wait_ready()
        with ThreadPoolExecutor(count) as threads, Client(engine.address) as client:
            answers = [threads.submit(ask, engine.url, index, max_tokens, index % 2 == 0) for index in range(count)]
            assert wait_until(lambda: client.info().stats["num_running"] == count, 10)
            yield engine, answers
    finally:
        engine.kill_all()


def assert_told_of_the_end(answers: list[Future], code: int, message: str) -> None:
    """Streams that have begun end with an error and no reason of success, all else with its code."""
    for index, answer in enumerate(answers):
        status, parts, is_whole = answer.result(timeout=10)
        error = parts[-1]["error"]
        assert status == code or (status == 200 and index % 2 == 0 and len(parts) > 1 and is_whole)
        assert error["code"] == code and message in error["message"]
        assert all(part["choices"][0]["finish_reason"] is None for part in parts[:-1])


def test_requests_are_finished_and_new_ones_refused_before_the_engine_ends():
    with busy_engine("--shutdown-timeout", "30", max_tokens=SECONDS_LONG) as (engine, answers), httpx.Client(base_url=engine.url) as http:
        engine.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: http.get("/ready").status_code == 503)
        assert "shutting down" in http.get("/ready").json()["error"]["message"] and http.get("/health").status_code == 200
        refused = http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        with Client(engine.address) as client, pytest.raises(EngineError, match="shutting down"):
            client.complete(prompt_ids=[1], max_tokens=1)
        assert not any(answer.done() for answer in answers), "the requests must outlast the refusals"
        for index, answer in enumerate(answers):
            status, parts, is_whole = answer.result(timeout=60)
            tokens = [token for part in parts for token in part["choices"][0]["token_ids"]]
            assert (status, is_whole, tokens) == (200, True, continuation([index], SECONDS_LONG))
            assert parts[-1]["choices"][0]["finish_reason"] == "length"
        assert engine.process.wait(3) == 0
        engine.assert_gone(within_s=1)


@pytest.mark.parametrize("seconds", [0, 1])
def test_requests_that_outlast_the_time_to_drain_get_an_error(seconds):
    with busy_engine("--shutdown-timeout", str(seconds), max_tokens=ENDLESS) as (engine, answers):
        began = time.monotonic()
        engine.process.send_signal(signal.SIGTERM)
        assert_told_of_the_end(answers, 503, "shutting down")
        assert engine.process.wait(5) == 0
        assert seconds <= time.monotonic() - began < seconds + 3
        engine.assert_gone(within_s=1)


def test_a_second_signal_ends_the_draining():
    with busy_engine("--shutdown-timeout", "60", max_tokens=ENDLESS) as (engine, answers):
        engine.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: httpx.get(f"{engine.url}/ready").status_code == 503)
        engine.process.send_signal(signal.SIGTERM)
        assert_told_of_the_end(answers, 503, "shutting down")
        assert engine.process.wait(5) == 0


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
def test_a_killed_process_ends_every_request_with_an_error_and_the_engine(victim):
    with busy_engine("--shutdown-timeout", "30", max_tokens=ENDLESS, count=20) as (engine, answers):
        os.kill(engine.pid_of(victim), signal.SIGKILL)
        assert_told_of_the_end(answers, 500, "the engine has failed")
        assert engine.process.wait(5) == 1 and engine.reason() == f"{victim} was killed by SIGKILL"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{engine.url}/health")


def test_a_worker_that_stands_still_is_named_by_the_watchdog():
    with busy_engine("--watchdog-timeout", "1", max_tokens=ENDLESS) as (engine, answers):
        time.sleep(0.5)  # the first step may take longer
        os.kill(engine.pid_of("worker"), signal.SIGSTOP)
        began = time.monotonic()
        assert_told_of_the_end(answers, 500, "the engine has failed")
        assert engine.process.wait(10) == 1
        assert 0.9 < time.monotonic() - began < 8
        assert re.search(r"step \d+ has not come back from the worker for 1.* s; --watchdog-timeout", engine.reason())


def test_an_idle_engine_is_left_alone_by_the_watchdog():
    with EngineProcess(*FLAGS, "--watchdog-timeout", "1") as engine:
        httpx.post(f"{engine.url}/v1/completions", json={"prompt": [1], "max_tokens": 3})
        time.sleep(2.5)
        assert httpx.get(f"{engine.url}/ready").status_code == 200
