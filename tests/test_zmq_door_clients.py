"""Clients of the ZMQ door that leave, do not read, or ask for much; and how the door closes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from protocol.messages import Error, Generate, Output, encode
from protocol.sampling import SamplingParams
from tests.raw_client import VERSION, RawClient
from tests.scripted_scheduler import ROOT, RunningFrontend, wait_until


@pytest.fixture(scope="module")
def frontend(tmp_path_factory):
    with RunningFrontend(tmp_path_factory.mktemp("door")) as running:
        yield running


@pytest.fixture
def client(frontend):
    with RawClient(frontend.address) as raw:
        yield raw


# ---- clients that leave, or do not read ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", ["close", "kill"])
def test_a_client_that_leaves_is_noticed_within_two_seconds(frontend, stream, way):
    frontend.scheduler.paused = not stream
    before = len(frontend.scheduler.added)
    request = encode(Generate(1, prompt_ids=[1], sampling=SamplingParams(max_tokens=190), stream=stream))
    program = (
        f"import zmq, time; s = zmq.Context().socket(zmq.DEALER); s.connect({frontend.address!r});"
        f"s.send_multipart([{VERSION!r}, {request!r}]); time.sleep(60 if {way == 'kill'} else 0.3)"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    assert wait_until(lambda: len(frontend.scheduler.added) > before)
    frontend.scheduler.paused = True
    if way == "kill":
        os.kill(process.pid, signal.SIGKILL)
    process.wait(5)
    handle = frontend.scheduler.added[-1].handle
    assert wait_until(lambda: handle in frontend.scheduler.aborted, 2.0)
    frontend.scheduler.paused = False


def test_a_client_that_does_not_read_is_ended_and_told_and_others_are_served(frontend, client):
    with RawClient(frontend.address, high_water_mark=1) as sloth:
        sent = 0
        before = len(frontend.scheduler.aborted)

        def ended() -> bool:
            nonlocal sent
            for _ in range(20):
                sloth.send(Generate(sent, prompt_ids=[1], sampling=SamplingParams(max_tokens=190)))
                sent += 1
            return len(frontend.scheduler.aborted) > before

        sloth.socket.sndhwm = 0
        assert wait_until(ended, 20.0)
        assert client.serves()
        last = {}
        while (message := sloth.receive(0.5)) is not None:
            last[message.request_id] = message
        assert len(last) == sent  # each request had a last word
        reasons = {message.code if isinstance(message, Error) else message.finish_reason for message in last.values()}
        assert reasons <= {503, "length"} and 503 in reasons
    assert wait_until(lambda: not frontend.scheduler.running)


def test_a_client_that_pauses_for_less_than_a_second_loses_nothing(frontend):
    with RawClient(frontend.address, high_water_mark=1) as sleepy:
        for request_id in range(40):  # 7,600 messages, far more than the queues of sockets and kernel and the backlog hold
            sleepy.send(Generate(request_id, prompt_ids=[1], sampling=SamplingParams(max_tokens=190)))
        assert wait_until(lambda: len(frontend.scheduler.running) == 40)
        assert wait_until(lambda: not frontend.scheduler.running)
        time.sleep(0.1)
        reasons = []
        while len(reasons) < 40:
            message = sleepy.receive()
            assert isinstance(message, Output), message
            reasons += [message.finish_reason] if message.finish_reason else []
        assert set(reasons) == {"length"}


def test_a_client_of_many_streams_that_reads_is_never_taken_for_slow(client):
    count = 3000  # each step is more messages than the socket's queue and the backlog hold together
    for request_id in range(count):
        client.send(Generate(request_id, prompt_ids=[request_id % 900], sampling=SamplingParams(max_tokens=8)))
    tokens = {request_id: [] for request_id in range(count)}
    num_open = count
    while num_open:
        output = client.receive()
        assert isinstance(output, Output), output
        tokens[output.request_id] += output.token_ids
        num_open -= output.finish_reason is not None
    assert all(ids == [request_id % 900 + 1 + index for index in range(8)] for request_id, ids in tokens.items())


def test_twenty_thousand_requests_without_reading_are_all_answered(frontend, client):
    client.socket.rcvhwm = 0
    count = 20_000
    for request_id in range(count):
        client.send(Generate(request_id, prompt_ids=[1], sampling=SamplingParams(max_tokens=1), stream=False))
    answered = {client.receive().request_id for _ in range(count)}
    assert answered == set(range(count))


# ---- the end ------------------------------------------------------------------------------------------------------


def test_shutdown_answers_every_open_request_and_leaves_nothing(tmp_path):
    with RunningFrontend(tmp_path) as running, RawClient(running.address) as raw:
        running.scheduler.paused = True
        for request_id in range(10):
            raw.send(Generate(request_id, prompt_ids=[1], stream=request_id % 2 == 0))
        assert wait_until(lambda: len(running.scheduler.added) == 10)
        start = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - start < 1.5
        errors = [raw.receive() for _ in range(10)]
        assert {(error.request_id, error.code) for error in errors} == {(request_id, 503) for request_id in range(10)}
        assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_cannot_be_read_is_one_line_and_exit_code_2(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{")
    with RunningFrontend(tmp_path, model=str(model)) as running:
        assert json.loads(running.first_line)["exit_code"] == 2
        assert "tokenizer.json cannot be read" in json.loads(running.first_line)["reason"]
        assert running.process.wait(5) == 2


def test_the_client_side_needs_no_torch():
    program = "import sys, frontend, frontend.client, frontend.engine, frontend.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
