"""The HTTP door over real processes: OpenAI's shapes, streams, errors, and clients that leave."""

import json
import socket
import time
import tomllib
from contextlib import contextmanager

import httpx
import pytest

from frontend.client import Client
from frontend.http_bodies import NOT_YET, ChatBody, CompletionBody, chat_request, completion_requests, read_body
from frontend.http_door import MAX_BODY_BYTES
from tests.checksum_reference import continuation
from tests.engine_process import ROOT, EngineProcess
from tests.scripted_scheduler import text_frontend
from tests.test_checksum_engine import FLAGS, assert_back_to_start, idle_stats

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@contextmanager
def checksum_engine(*flags: str):
    """An engine, an HTTP client and a ZMQ client of it."""
    with EngineProcess(*FLAGS, *flags) as engine, Client(engine.address) as zmq_client:
        with httpx.Client(base_url=engine.url, timeout=30) as http:
            yield http, zmq_client


@pytest.fixture(scope="module")
def engine():
    with checksum_engine("--max-num-seqs", "8") as clients:
        yield clients


@pytest.fixture(scope="module")
def http(engine):
    return engine[0]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A door with a tokenizer and a chat template; the model answers a prompt with the same text again."""
    files = {"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE})}
    folder = tmp_path_factory.mktemp("text")
    with text_frontend(folder, files, port=0) as frontend:
        with httpx.Client(base_url=f"http://127.0.0.1:{frontend.config.port}", timeout=30) as http:
            yield http


def events(response: httpx.Response) -> list[dict | str]:
    """The contents of a stream, whose framing is checked."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, rest = response.text.split("\n\n")
    assert rest == "" and all(frame.startswith("data: ") for frame in frames)
    return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


def test_the_routes_that_tell_about_the_engine(http):
    assert http.get("/health").json() == {"status": "ok"} and http.get("/ready").status_code == 200
    assert http.get("/ping").status_code == 200
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert http.get("/version").json() == {"version": project["version"]}
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("checksum", "model", 4096)
    assert http.get("/v1/models/checksum").json() == model


def test_a_completion_of_token_ids_has_openais_shape_and_the_models_tokens(http):
    body = {"model": "checksum", "prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["index"]) == (continuation([5, 6, 7], 9), "length", 0)
    assert (answer["object"], answer["model"]) == ("text_completion", "checksum") and answer["id"].startswith("cmpl-")
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 0}
    }  # fmt: skip


def test_several_prompts_and_choices_come_in_order(http):
    body = {"prompt": [[1, 2], [3]], "max_tokens": 4, "temperature": 0, "n": 2, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body).json()
    expected = [continuation(prompt, 4) for prompt in ([1, 2], [1, 2], [3], [3])]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 16)


@pytest.mark.parametrize("continuous", [False, True])
def test_a_stream_has_the_same_tokens_then_its_usage_then_done(http, continuous):
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    body = {"prompt": [9], "max_tokens": 20, "temperature": 0, "stream": True, "stream_options": options, "return_token_ids": True}
    *chunks, last, done = events(http.post("/v1/completions", json=body))
    assert done == "[DONE]" and last["choices"] == [] and last["usage"]["completion_tokens"] == 20
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == continuation([9], 20)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert all(("usage" in chunk) == continuous for chunk in chunks)
    if continuous:
        assert chunks[-1]["usage"]["total_tokens"] == 21


def test_a_chat_is_answered_whole_and_streamed(text):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]}]
    whole = text.post("/v1/chat/completions", json={"messages": messages, "max_completion_tokens": 100, "user": "x", "stop": None}).json()
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": "user:hello there;"}
    assert whole["object"] == "chat.completion" and choice["finish_reason"] == "length"
    *chunks, done = events(text.post("/v1/chat/completions", json={"messages": messages, "stream": True}))
    assert done == "[DONE]" and chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "user:hello there;"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])


def test_text_prompts_and_stop_strings(text):
    answer = text.post("/v1/completions", json={"prompt": ["one two three", "x"], "stop": " two"}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "x"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]


REFUSED = [
    ({"prompt": [1], "temperature": -1}, "temperature must be between 0.0 and 1000.0, got -1", "temperature"),
    ({"prompt": [1], "max_tokens": 0}, "max_tokens must be between 1", "max_tokens"),
    ({"prompt": [1], "n": 129}, "n must be between 1 and 128, got 129", "n"),
    ({"prompt": [1000]}, "prompt_ids must hold ids between 0 and 999, got 1000", None),
    ({"prompt": []}, "prompt takes 1 to 64 prompts, got 0", "prompt"),
    ({"prompt": [[1], "x"]}, "this model has no tokenizer", None),
    ({"prompt": [1, "x"]}, "prompt must be a text", "prompt"),
    ({"prompt": [1], "temperatur": 1}, "unknown field `temperatur`", "temperatur"),
    ({"prompt": [1], "temperature": "hot"}, "Expected `float | null`, got `str`", None),
    ({"prompt": [1], "stream_options": {}}, "stream_options is for streams only", "stream_options"),
    ({}, "missing required field `prompt`", "prompt"),
]


@pytest.mark.parametrize(("body", "message", "param"), REFUSED)
def test_a_bad_body_is_refused_with_the_field_in_openais_shape(http, body, message, param):
    response = http.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == error["code"] == 400 and error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert param is None or error["param"] == param


@pytest.mark.parametrize("field", NOT_YET)
def test_fields_to_come_are_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{field} is not supported yet"):
        read_body(json.dumps({"messages": [], field: "x"}).encode(), ChatBody)


def test_other_errors_have_openais_shape_too(http):
    cases = [
        (http.post("/v1/completions", json={"model": "other", "prompt": [1]}), 404, "'other' does not exist"),
        (http.get("/v1/models/other"), 404, "does not exist"), (http.get("/nowhere"), 404, "/nowhere"),
        (http.get("/v1/completions"), 405, "Not Allowed"), (http.post("/v1/completions", content=b"{"), 400, ""),
        (http.post("/v1/completions", content=b"[1]"), 400, "must be a JSON object"),
        (http.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1)), 413, "at most"),
    ]  # fmt: skip
    for response, code, message in cases:
        assert response.status_code == response.json()["error"]["code"] == code
        assert message in response.json()["error"]["message"]


def test_null_is_the_default_and_both_names_of_the_length_are_taken():
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": None, "stop": None, "seed": None, "n": None, "max_tokens": None}
    plain = chat_request(read_body(b'{"messages":[{"role":"user"}]}', ChatBody))
    assert chat_request(read_body(json.dumps(body).encode(), ChatBody)).sampling == plain.sampling
    for name in ("max_tokens", "max_completion_tokens"):
        assert chat_request(read_body(json.dumps(body | {name: 7}).encode(), ChatBody)).sampling.max_tokens == 7
    with pytest.raises(ValueError, match="differ"):
        chat_request(read_body(json.dumps(body | {"max_tokens": 7, "max_completion_tokens": 8}).encode(), ChatBody))
    biased = read_body(b'{"prompt": "x", "logit_bias": {"5": -100}, "ignore_eos": true, "min_tokens": 2}', CompletionBody)
    (request,) = completion_requests(biased)
    assert request.sampling.logit_bias == {"5": -100.0} and request.sampling.ignore_eos and request.sampling.min_tokens == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_gives_its_rows_back(engine, stream):
    http, zmq_client = engine
    body = {"prompt": [1], "max_tokens": 4000, "stream": stream}
    with socket.create_connection((http.base_url.host, http.base_url.port)) as raw:
        content = json.dumps(body).encode()
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
        deadline = time.monotonic() + 10
        while zmq_client.info().stats["num_running"] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert_back_to_start(idle_stats(zmq_client, within_s=3))


def test_a_full_queue_is_a_503_with_the_time_to_wait():
    with checksum_engine("--max-num-seqs", "1", "--max-num-queued-reqs", "1") as (http, zmq_client):
        running = zmq_client.generate(prompt_ids=[1], max_tokens=4000)
        next(running)
        with httpx.Client(base_url=http.base_url, timeout=30) as other:
            with other.stream("POST", "/v1/completions", json={"prompt": [1], "max_tokens": 4000, "stream": True}):
                while zmq_client.info().stats["num_waiting"] == 0:
                    time.sleep(0.01)
                response = http.post("/v1/completions", json={"prompt": [2], "max_tokens": 1})
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert "queue is full" in response.json()["error"]["message"]
        running.close()


def test_a_port_in_use_ends_the_start_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = EngineProcess(*FLAGS, "--port", str(taken.getsockname()[1]))
        try:
            assert engine.process.wait(30) != 0
            assert "cannot listen on --host 127.0.0.1 --port" in engine.errors()
        finally:
            engine.kill_all()
