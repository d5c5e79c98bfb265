"""Several frontend processes: clients are spread over them at both doors, and together they look like one."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from frontend.client import Client
from tests.checksum_reference import continuation
from tests.engine_process import MODULES, EngineProcess
from tests.scripted_scheduler import wait_until
from tests.test_checksum_engine import FLAGS, assert_back_to_start, idle_stats
from tests.test_metrics import scrape, value

NUM_FRONTENDS = 3


@pytest.fixture(scope="module")
def engine():
    with EngineProcess(*FLAGS, "--frontend-workers", str(NUM_FRONTENDS)) as engine:
        yield engine


def frontends(engine: EngineProcess) -> list[psutil.Process]:
    children = psutil.Process(engine.process.pid).children(recursive=True)
    return [child for child in children if MODULES["frontend"] in child.cmdline()]


def ask_over_http(url: str, prompt: int) -> dict:
    body = {"prompt": [prompt], "max_tokens": 30, "temperature": 0, "return_token_ids": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()  # a connection of its own


def ask_over_zmq(address: str, prompt: int) -> list[int]:
    with Client(address) as client:
        return client.complete(prompt_ids=[prompt], max_tokens=30, temperature=0.0).token_ids


def test_every_frontend_serves_both_doors_and_the_metrics_are_of_all(engine):
    before = scrape(engine.url)
    busy = [sum(process.cpu_times()[:2]) for process in frontends(engine)]
    assert len(busy) == NUM_FRONTENDS
    with ThreadPoolExecutor(8) as threads:
        over_http = list(threads.map(lambda prompt: ask_over_http(engine.url, prompt), range(60)))
        over_zmq = list(threads.map(lambda prompt: ask_over_zmq(engine.address, prompt), range(60)))
    for prompt, (answer, tokens) in enumerate(zip(over_http, over_zmq, strict=True)):
        assert answer["choices"][0]["token_ids"] == tokens == continuation([prompt], 30)
    assert all(sum(process.cpu_times()[:2]) > then for process, then in zip(frontends(engine), busy, strict=True))

    def num_generated() -> float:
        return value(scrape(engine.url), "generation_tokens_total") - value(before, "generation_tokens_total")

    for _ in range(2 * NUM_FRONTENDS):  # whichever frontend answers, once the others have reported
        assert wait_until(lambda: num_generated() == 120 * 30)
    with Client(engine.address) as client:
        assert_back_to_start(idle_stats(client))


def test_a_client_that_leaves_is_noticed_by_whichever_frontend_it_had(engine):
    port = httpx.URL(engine.url).port
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * NUM_FRONTENDS)]
    content = b'{"prompt": [1], "max_tokens": 4000, "stream": true}'
    for connection in sockets:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
    for connection in sockets:
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()
    with Client(engine.address) as client:
        assert_back_to_start(idle_stats(client, within_s=3))


def test_a_killed_frontend_is_the_reason_for_the_end():
    engine = EngineProcess(*FLAGS, "--frontend-workers", "2")
    try:
        engine.wait_ready()
        frontends(engine)[1].kill()
        assert engine.process.wait(5) == 1
        assert "frontend" in engine.reason() and "SIGKILL" in engine.reason()
        engine.assert_gone(within_s=2)
    finally:
        engine.kill_all()


def test_a_unix_socket_takes_the_place_of_the_port_and_is_gone_at_the_end(tmp_path):
    path = tmp_path / "http.sock"
    with EngineProcess(*FLAGS, "--uds", str(path)) as engine:
        assert engine.url == f"http+unix://{path}" and path.stat().st_mode & 0o077 == 0
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://engine") as http:
            assert http.get("/ready").status_code == 200
            answer = http.post("/v1/completions", json={"prompt": [3], "max_tokens": 4, "temperature": 0, "return_token_ids": True})
            assert answer.json()["choices"][0]["token_ids"] == continuation([3], 4)
        listening = [found for found in psutil.net_connections("tcp") if found.status == psutil.CONN_LISTEN and found.pid in engine.pids]
        assert not listening
    assert not path.exists()


def test_without_http_there_is_no_listening_socket():
    with EngineProcess(*FLAGS, "--no-http") as engine:
        assert ask_over_zmq(engine.address, 1) == continuation([1], 30)
        time.sleep(0.1)
        assert not [found for found in psutil.net_connections("tcp") if found.status == psutil.CONN_LISTEN and found.pid in engine.pids]
