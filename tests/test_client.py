"""The clients, as a library and from the shell, against a real frontend process with a scripted scheduler."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import aclosing, closing

import msgspec
import pytest
import zmq

from frontend.client import AsyncClient, Client, EngineError
from protocol.address import default_client_address
from protocol.messages import Error, Info, Output, encode, unpack
from protocol.transport import MAX_IPC_PATH, check_ipc_address
from tests.scripted_scheduler import MAX_MODEL_LEN, ROOT, RunningFrontend, text_frontend, wait_until

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def frontend(tmp_path_factory):
    with RunningFrontend(tmp_path_factory.mktemp("client")) as running:
        yield running


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    with text_frontend(tmp_path_factory.mktemp("texts"), {"chat_template.jinja": TEMPLATE}) as running:
        yield running


class FakeDoor:
    """A ROUTER that answers GetInfo, and the next request with the messages it was given."""

    def __init__(self, address: str, messages: list):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(address)
        self.thread = threading.Thread(target=self.serve, args=(messages,), daemon=True)
        self.thread.start()

    def serve(self, messages: list) -> None:
        identity, _version, _payload = self.socket.recv_multipart()
        self.socket.send_multipart([identity, b"\x01", encode(Info("fake", 10, 10, {}))])
        self.socket.recv_multipart()
        for message in messages:
            self.socket.send_multipart([identity, b"\x01", message if isinstance(message, bytes) else encode(message)])


# ---- the library --------------------------------------------------------------------------------------------------


def test_streamed_and_whole_answers_are_the_same(frontend):
    with Client(frontend.address) as client:
        outputs = list(client.generate(prompt_ids=[7], max_tokens=30))
        whole = client.complete(prompt_ids=[7], max_tokens=30)
    assert [token for output in outputs for token in output.token_ids] == whole.token_ids == list(range(8, 38))
    assert (whole.finish_reason, whole.usage.completion_tokens) == ("length", 30)


def test_chat_yields_the_text(texts):
    with Client(texts.address) as client:
        assert "".join(client.chat([{"role": "user", "content": "Größe 日本"}])) == "user: Größe 日本\n"


def test_several_generators_of_one_client_may_be_open_at_once(frontend):
    with Client(frontend.address) as client:
        first, second = (client.generate(prompt_ids=[start], max_tokens=10) for start in (100, 200))
        pairs = list(zip(first, second))
        assert [output.token_ids[0] for output, _ in pairs][0] == 101 and [output.token_ids[0] for _, output in pairs][0] == 201


def test_leaving_a_generator_early_cancels_its_request(frontend):
    with Client(frontend.address) as client:
        with closing(client.generate(prompt_ids=[1])) as outputs:
            next(outputs)
        handle = frontend.scheduler.added[-1].handle
        assert wait_until(lambda: handle in frontend.scheduler.aborted)
        assert client.complete(prompt_ids=[7], max_tokens=2).token_ids == [8, 9]


def test_errors_are_raised_with_code_and_message(frontend):
    with Client(frontend.address) as client:
        with pytest.raises(EngineError, match="the prompt is empty") as caught:
            client.complete(prompt_ids=[])
        assert caught.value.code == 400
        with pytest.raises(ValueError, match="unknown field `best_of`"):
            client.complete(prompt_ids=[1], best_of=2)
        with pytest.raises(ValueError, match="at most 8388608 bytes"):
            client.complete("x" * (9 << 20))
        assert client.complete(prompt_ids=[7], max_tokens=2).token_ids == [8, 9]


def test_a_reply_that_does_not_come_in_time_is_an_error(frontend):
    with Client(frontend.address, timeout=0.7) as client:
        client.info()
        frontend.scheduler.paused = True
        with pytest.raises(EngineError, match="no answer"):  # keep-alives do not count
            client.complete(prompt_ids=[1])
        frontend.scheduler.paused = False
        assert client.complete(prompt_ids=[7], max_tokens=2).token_ids == [8, 9]


def test_an_absent_engine_is_an_error_within_the_connect_timeout(tmp_path):
    start = time.monotonic()
    with Client(f"ipc://{tmp_path}/nobody", connect_timeout=0.3) as client:
        with pytest.raises(EngineError, match=f"no answer from the engine at ipc://{tmp_path}/nobody"):
            client.complete("x")

    async def connect():
        async with AsyncClient(f"ipc://{tmp_path}/nobody", connect_timeout=0.3):
            pass

    with pytest.raises(EngineError, match="no answer"):
        asyncio.run(connect())
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "messages, reason",
    [
        ([Output(0, 0, "a", [1]), Output(0, 2, "c", [3])], "output 1 of request 0 was due, 2 came"),
        ([Output(0, 0, "a", [1]), Output(0, 0, "a", [1])], "output 1 of request 0 was due, 0 came"),
        ([b"\xff"], "malformed message"),
        ([Error(0, 418, "no tea")], "no tea"),
    ],
)
@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_gaps_repeats_and_garbage_are_errors(tmp_path, messages, reason, kind):
    address = f"ipc://{tmp_path}/door"
    door = FakeDoor(address, messages)

    async def read():
        async with AsyncClient(address, timeout=2) as client:
            async for _ in client.generate(prompt_ids=[1]):
                pass

    with pytest.raises(EngineError, match=reason):
        if kind == "async":
            asyncio.run(read())
        else:
            with Client(address, timeout=2) as client:
                list(client.generate(prompt_ids=[1]))
    door.thread.join(5)
    door.context.destroy(linger=0)


def test_many_requests_share_one_async_client(frontend):
    async def ask_all():
        async with AsyncClient(frontend.address) as client:
            return await asyncio.gather(*(client.complete(prompt_ids=[start], max_tokens=20) for start in range(800)))

    for start, answer in enumerate(asyncio.run(ask_all())):
        assert answer.token_ids == [(start + 1 + index) % 1000 for index in range(20)]


def test_no_consumer_waits_for_one_that_does_not_read(frontend):
    async def ask() -> float:
        async with AsyncClient(frontend.address) as client, aclosing(client.generate(prompt_ids=[1], max_tokens=190)) as idle:
            await anext(idle)
            order = []

            async def read(num_tokens: int) -> None:
                async for output in client.generate(prompt_ids=[2], max_tokens=num_tokens):
                    if output.finish_reason:
                        order.append(num_tokens)

            await asyncio.gather(*(read(num_tokens) for num_tokens in range(150, 0, -10)))
            assert order == sorted(order)  # each ends with its own last token
            return sum([len(output.token_ids) async for output in idle])

    assert asyncio.run(ask()) == 189


def test_async_requests_are_cancelled_on_leaving_and_on_cancellation(frontend):
    async def leave():
        async with AsyncClient(frontend.address) as client:
            async with aclosing(client.generate(prompt_ids=[1])) as outputs:
                await anext(outputs)
            task = asyncio.create_task(client.complete(prompt_ids=[1]))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task])
            handles = [request.handle for request in frontend.scheduler.added[-2:]]
            assert await asyncio.to_thread(wait_until, lambda: set(handles) <= set(frontend.scheduler.aborted))
            assert not client.replies

    asyncio.run(leave())


# ---- the shell ----------------------------------------------------------------------------------------------------


def shell(address: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "frontend.client", "--address", address, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize("options", [[], ["--no-stream"]])
def test_a_prompt_is_answered_on_stdout(texts, options):
    result = shell(texts.address, "Größe und 日本", "--max-tokens", "100", *options)
    assert (result.returncode, result.stdout, result.stderr) == (0, "Größe und 日本\n", "")


def test_chat_stop_and_json(texts):
    result = shell(texts.address, "one two three", "--chat", "--json", "--stop", "three", "--stop", "x", "--temperature", "0")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0 and {event["type"] for event in events} == {"output"}
    assert "".join(event["text"] for event in events) == "user: one two "
    assert events[-1]["finish_reason"] == "stop" and events[-1]["usage"]["completion_tokens"] > 0
    assert texts.scheduler.added[-1].sampling.temperature == 0


def test_every_sampling_parameter_has_an_option(texts):
    values = "--top-k 5 --top-p 0.5 --min-p 0.25 --seed -9 --stop-token-ids 3 4 --ignore-eos --temperature 2".split()
    assert shell(texts.address, "hi", *values).returncode == 0
    added = texts.scheduler.added[-1]
    assert msgspec.to_builtins(added.sampling)[:5] == [2.0, 5, 0.5, 0.25, -9] and added.end_ids == [3, 4]
    values = "--min-tokens 2 --repetition-penalty 1.5 --presence-penalty 1 --frequency-penalty -1 --allowed-token-ids 5 6".split()
    assert shell(texts.address, "hi", *values, "--logit-bias", '{"17": -100}', "--bad-words", "x", "--bad-words", "y").returncode == 0
    added = texts.scheduler.added[-1]
    assert msgspec.to_builtins(added.sampling)[5:9] == [1.5, 1.0, -1.0, 2] and len(added.controls.bad_words) == 4
    assert unpack(added.controls.bias_ids).tolist() == [17] and unpack(added.controls.allowed_ids).tolist() == [5, 6]


def test_errors_are_one_line_with_exit_code_1(texts, tmp_path):
    result = shell(texts.address, "word " * MAX_MODEL_LEN)
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and str(MAX_MODEL_LEN) in result.stderr
    result = shell(texts.address, "x", "--json", "--top-p", "7")
    assert result.returncode == 1 and json.loads(result.stdout)["code"] == 400
    assert shell(texts.address, "x", "--unheard-of").returncode == 2


def test_ctrl_c_cancels_and_exits_with_130(frontend, texts):
    texts.scheduler.paused = True
    process = subprocess.Popen(
        [sys.executable, "-m", "frontend.client", "--address", texts.address, "hello"], cwd=ROOT, stderr=subprocess.PIPE
    )
    before = len(texts.scheduler.added)
    assert wait_until(lambda: len(texts.scheduler.added) > before)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(5) == 130 and process.stderr.read() == b""
    process.stderr.close()
    assert wait_until(lambda: texts.scheduler.added[-1].handle in texts.scheduler.aborted, 1.0)
    texts.scheduler.paused = False


def test_the_default_address_fits_the_kernel_and_is_this_users(monkeypatch, tmp_path):
    path = check_ipc_address(default_client_address())
    assert str(os.getuid()) in path.parent.name
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * MAX_IPC_PATH)))
    check_ipc_address(default_client_address())
