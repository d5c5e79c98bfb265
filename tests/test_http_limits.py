"""What a client of the HTTP door may not do: stand still in the middle, send without end, take too many connections."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager, suppress

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from frontend import http_server
from frontend.http_bodies import CompletionBody, read_body
from frontend.http_server import HttpServer
from frontend.metrics import RequestMetrics
from tests.scripted_scheduler import RunningFrontend, wait_until

HALF_SENT, UNREAD = 0.4, 0.5  # seconds
POST = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"


async def _echo(request: Request) -> Response:
    return Response(await request.body())


async def _flood(request: Request) -> Response:
    async def parts():
        for _ in range(1000):
            yield b"x" * 100_000

    return StreamingResponse(parts())


@contextmanager
def served(**limits: float):
    """The server alone, with an application that echoes and floods; its port and its metrics."""
    app = Starlette(routes=[Route("/echo", _echo, methods=["POST"]), Route("/flood", _flood)])
    listener = socket.create_server(("127.0.0.1", 0))
    port, metrics, loop = listener.getsockname()[1], RequestMetrics(), asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def serve() -> None:
        server = HttpServer(app, listener, metrics)
        server.start()
        await is_over.wait()
        await server.stop()

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HALF_SENT_SECONDS": HALF_SENT, "UNREAD_SECONDS": UNREAD, **limits}.items():
            patch.setattr(http_server, name, value)
        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        try:
            yield port, metrics
        finally:
            loop.call_soon_threadsafe(is_over.set)
            thread.join(10)
            loop.close()


@pytest.fixture(scope="module")
def server():
    with served() as server:
        yield server


@pytest.fixture
def connection(server):
    with socket.create_connection(("127.0.0.1", server[0]), timeout=10) as connection:
        yield connection


def read_echo(connection: socket.socket) -> bytes:
    """Of ten bytes: the answer's head and they may come apart."""
    answer = b""
    while len(answer.partition(b"\r\n\r\n")[2]) < 10:
        answer += connection.recv(4096)
    return answer[-10:]


def seconds_until_cut(connection: socket.socket) -> float:
    began = time.monotonic()
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began


@pytest.mark.parametrize("sent", [b"", b"POST", b"POST /echo HTTP/1.1\r\nHost: x\r\n", POST, POST + b"12345"])
def test_a_request_that_stops_in_its_middle_is_cut(connection, sent):
    connection.sendall(sent)
    assert HALF_SENT - 0.1 < seconds_until_cut(connection) < HALF_SENT + 2


def test_a_head_that_drips_is_cut_and_a_body_that_drips_is_not(server, connection):
    began = time.monotonic()
    with pytest.raises(OSError):
        for byte in b"POST /echo HTTP/1.1\r\nHost: a-long-name-of-a-host\r\nContent-Length: 10\r\n\r\n":
            connection.sendall(bytes([byte]))
            time.sleep(HALF_SENT / 8)
    assert time.monotonic() - began < HALF_SENT + 2
    with socket.create_connection(("127.0.0.1", server[0]), timeout=10) as slow:
        slow.sendall(POST)
        for byte in b"0123456789":
            time.sleep(HALF_SENT / 3)
            slow.sendall(bytes([byte]))
        assert read_echo(slow) == b"0123456789"


def test_a_second_request_on_the_connection_has_the_same_limits(connection):
    for _ in range(2):
        connection.sendall(POST + b"0123456789")
        assert read_echo(connection) == b"0123456789"
        time.sleep(HALF_SENT * 1.5)  # between two requests it may rest
    connection.sendall(POST + b"0")
    assert seconds_until_cut(connection) < HALF_SENT + 2


def test_a_connection_that_rests_too_long_is_closed():
    with served(IDLE_SECONDS=1) as (port, _), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(POST + b"0123456789")
        assert read_echo(connection) == b"0123456789"
        assert 0.5 < seconds_until_cut(connection) < 4


def test_who_does_not_read_is_cut_and_counted_and_who_reads_slowly_is_not(server):
    port, metrics = server
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", port))
        connection.sendall(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(10):
            time.sleep(UNREAD / 4)
            for _ in range(20):
                assert connection.recv(100_000)
        assert metrics.num_slow_readers == 0
        assert wait_until(lambda: metrics.num_slow_readers == 1, UNREAD + 3)


ENDLESS_HEADS = [b"GET /" + b"a" * 300_000, b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000]


@pytest.mark.parametrize("sent", [*ENDLESS_HEADS, b"\x16\x03\x01\x02\r\n\r\n", b"GET /echo\r\n\r\n"])
def test_a_head_without_end_or_sense_ends_the_connection(connection, sent):
    answer = b""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(sent)
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400") or (sent in ENDLESS_HEADS and not answer)
    assert connection.fileno() and seconds_until_cut(connection) < 1


def test_connections_beyond_the_limit_are_refused_and_those_within_served():
    with served(MAX_CONNECTIONS=3) as (port, _):
        kept = []
        for expected in (b"200", b"200", b"503"):  # uvicorn counts the one that asks
            kept.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            kept[-1].sendall(POST + b"0123456789")
            assert kept[-1].recv(4096).split()[1] == expected
        for connection in kept:
            connection.close()


# ---- request ids, comments and parts of streams, over a frontend with a scripted scheduler ---------------------------


@pytest.fixture
def paused(tmp_path):
    with RunningFrontend(tmp_path, port=0, sse_keep_alive_interval=0.05, stream_interval=8) as frontend:
        with httpx.Client(base_url=f"http://127.0.0.1:{frontend.config.port}", timeout=10) as http:
            yield frontend, http


def test_a_stream_that_waits_has_comments_and_then_its_tokens(paused):
    frontend, http = paused
    frontend.scheduler.paused = True
    lines = []
    body = {"prompt": [1], "max_tokens": 3, "stream": True, "return_token_ids": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            lines.append(line)
            if lines.count(": keep-alive") == 3:
                frontend.scheduler.paused = False
    assert lines.count(": keep-alive") >= 3 and lines[-2] == "data: [DONE]"
    assert sum('"token_ids":[' in line for line in lines) >= 1


def test_parts_of_a_stream_have_as_many_tokens_as_asked_for_but_for_the_first_and_the_last(paused):
    body = {"prompt": [1], "max_tokens": 30, "stream": True, "return_token_ids": True}
    lines = paused[1].post("/v1/completions", json=body).text.split("\n\n")
    parts = [httpx.Response(200, content=line[6:]).json() for line in lines if line.startswith("data: {")]
    tokens = [part["choices"][0]["token_ids"] for part in parts]
    assert sum(tokens, []) == list(range(2, 32))
    assert all(len(part) >= 8 for part in tokens[1:-1]) and 2 < len(tokens) < 7


def test_request_ids_are_the_clients_or_new_and_two_at_once_are_two_requests(paused):
    frontend, http = paused
    own = [http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}) for _ in range(2)]
    assert own[0].headers["x-request-id"] != own[1].headers["x-request-id"]
    body = {"max_tokens": 20, "stream": True, "return_token_ids": True}
    with http.stream("POST", "/v1/completions", json=body | {"prompt": [1]}, headers={"X-Request-Id": "same"}) as first:
        second = http.post("/v1/completions", json=body | {"prompt": [100]}, headers={"X-Request-Id": "same"})
        texts = [first.read().decode(), second.text]
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "same"
    for text, start in zip(texts, (2, 101), strict=True):
        parts = [httpx.Response(200, content=frame[6:]).json() for frame in text.split("\n\n") if frame.startswith("data: {")]
        assert {part["id"] for part in parts} == {"cmpl-same"}
        assert sum((part["choices"][0]["token_ids"] for part in parts), []) == list(range(start, start + 20))


@pytest.mark.parametrize("given", ["x" * 129, "a\tb", "caf\xe9\x80"])
def test_a_request_id_out_of_bounds_is_refused(paused, given):
    response = paused[1].post("/v1/completions", json={"prompt": [1], "max_tokens": 1}, headers={"X-Request-Id": given.encode("latin-1")})
    assert response.status_code == 400 and "X-Request-Id must be printable" in response.json()["error"]["message"]


HUGE_BODIES = {
    "values": b'{"prompt": [' + b"1," * 3_990_000 + b"1]}",
    "lists and objects": b'{"prompt": [' + b"[1]," * 1_990_000 + b"[1]]}",
    "texts": b'{"prompt": [' + b'"a",' * 1_990_000 + b'"a"]}',
}
HARMLESS_TEXTS = ['["a", {"b": "c,"}] \\ "' * 20_000, "\\" * 200_000 + '"', '[{,"' * 100_000 + "\\"]


@pytest.mark.parametrize("what", HUGE_BODIES)
def test_a_body_of_too_many_parts_is_refused_before_it_is_read(what):
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"the body may hold at most \\d+ {what}, got \\d+"):
        read_body(HUGE_BODIES[what], CompletionBody)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("text", HARMLESS_TEXTS)
def test_what_looks_like_parts_within_a_text_is_not_counted(text):
    assert read_body(json.dumps({"prompt": text}).encode(), CompletionBody).prompt == text
    assert read_body(json.dumps({"prompt": [text, "x"], "stop": '"'}).encode(), CompletionBody).prompt == [text, "x"]


def test_the_longest_prompts_of_ids_are_read():
    assert len(read_body(b'{"prompt": [' + b"1," * 1_000_000 + b"1]}", CompletionBody).prompt) == 1_000_001
