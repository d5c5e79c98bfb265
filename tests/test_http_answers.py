"""How answers end, what they count, and that text comes whole in streams: at both routes, streamed or not, beside odd neighbours."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from frontend.client import Client
from tests import tiny_tokenizers
from tests.checksum_reference import continuation
from tests.engine_process import EngineProcess
from tests.test_checksum_engine import FLAGS
from tests.test_http_door import events
from tests.test_http_text import text_door

END = "<|im_end|>"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ODD_TEXTS = ["👩‍👩‍👧‍👦 a family", "🇫🇷🇯🇵 flags", "ไทยและမြန်မာ", "龘靐齉 rare", "naïve “quotes” …", "tail 👩‍👩‍👧"]


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """The model answers a prompt with the same ids again, one a step, and ends at END."""
    end_id = tiny_tokenizers.byte_level().token_to_id(END)
    settings = {"tokenizer_config.json": {"chat_template": TEMPLATE}, "generation_config.json": {"eos_token_id": end_id}}
    files = {name: json.dumps(content) for name, content in settings.items()}
    with text_door(tmp_path_factory.mktemp("answers"), files) as (http, _):
        yield http


def ask(http: httpx.Client, route: str, text: str, stream: bool, **more: object) -> tuple[str, list[str], str, list[dict]]:
    """The text, its parts, the reason of its end, and everything that came."""
    response = http.post(f"/v1/{route}", json=_body(route, text) | more | {"stream": stream})
    parts = events(response)[:-1] if stream else [response.json()]
    kinds = {"completions": "text_completion", "chat/completions": "chat.completion.chunk" if stream else "chat.completion"}
    assert {part["object"] for part in parts} == {kinds[route]}
    choices = [part["choices"][0] for part in parts if part["choices"]]
    name = "delta" if stream else "message"
    texts = [choice["text"] if route == "completions" else choice[name]["content"] for choice in choices]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    if route != "completions":
        assert ["role" in choice[name] for choice in choices] == [True] + [False] * (len(choices) - 1)
    return "".join(texts), texts, choices[-1]["finish_reason"], parts


EVERYWHERE = [(route, stream) for route in ("completions", "chat/completions") for stream in (False, True)]


def _body(route: str, text: str) -> dict:
    return {"prompt": text} if route == "completions" else {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(("route", "stream"), EVERYWHERE)
@pytest.mark.parametrize(
    ("text", "more", "expected", "reason"),
    [
        (f"a sentence.{END} more", {}, "a sentence.", "stop"),
        (f"a sentence.{END} more", {"ignore_eos": True}, "a sentence. more", "length"),
        ("one two three", {"stop": "two"}, "one ", "stop"),
        ("one two three", {"stop": ["never", " thr"]}, "one two", "stop"),
        (f"one two{END}three", {"stop": END, "ignore_eos": True}, "one two", "stop"),
        ("one. two.", {"stop_token_ids": tiny_tokenizers.byte_level().encode(".").ids}, "one", "stop"),
        ("xxxxxxxxxx", {"max_tokens": 1}, None, "length"),
        ("one two three", {}, "one two three", "length"),
    ],
)
def test_the_reason_of_an_end_is_told_and_the_text_is_whole_up_to_it(http, route, stream, text, more, expected, reason):
    found, _, found_reason, _ = ask(http, route, text, stream, **more)
    assert found_reason == reason
    assert found == expected if expected is not None else 0 < len(found) < len(text)


@pytest.mark.parametrize(("route", "stream"), EVERYWHERE)
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_no_part_of_a_stream_has_half_a_character_and_together_they_are_the_text(http, route, stream, text):
    found, parts, _, _ = ask(http, route, text, stream)
    assert found == text and not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_of_a_stop_string_nothing_is_shown_and_of_half_a_one_everything(http, route):
    """Each letter is a token of its own: the half match is ruled out in its middle."""
    text = "q Z Y X W q Z Y X V q not shown"
    found, parts, reason, _ = ask(http, route, text, True, stop="Z Y X V")
    assert (found, reason) == ("q Z Y X W q ", "stop")
    assert len(parts) > 3


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_stop_string_that_never_comes_holds_back_no_more_than_may_become_one(http, route):
    text = "<think>q</think> w <think>e</think> r t y"
    whole, plain, _, _ = ask(http, route, text, True)
    found, parts, _, _ = ask(http, route, text, True, stop="a very long stop sentence that never comes")
    assert found == whole == text and len(parts) > len(plain) / 2


def test_the_zmq_door_streams_the_same_text(tmp_path):
    with text_door(tmp_path, {}) as (_, frontend), Client(frontend.address) as client:
        for text in ODD_TEXTS:
            assert "".join(output.text for output in client.generate(prompt=text)) == text
        outputs = list(client.generate(prompt="q Z Y X W q Z Y X V q", stop="Z Y X V"))
        assert "".join(output.text for output in outputs) == "q Z Y X W q " and outputs[-1].finish_reason == "stop"


def test_rubbish_of_one_request_is_that_requests_alone(http):
    """Random ids: invalid UTF-8, special ids, ids that the tokenizer lacks; beside eight texts."""
    rng = random.Random(4)
    rubbish = [[rng.randrange(1000) for _ in range(90)] for _ in range(24)]

    def send_rubbish(ids: list[int]) -> str:
        response = http.post("/v1/completions", json={"prompt": ids, "stream": True, "ignore_eos": True})
        assert events(response)[-2]["choices"][0]["finish_reason"] == "length"
        return response.text

    with ThreadPoolExecutor(16) as threads:
        texts = [threads.submit(ask, http, "completions", f"text {index} of eight: " + ODD_TEXTS[index % 6], True) for index in range(8)]
        list(threads.map(send_rubbish, rubbish))
        for index, answer in enumerate(texts):
            assert answer.result()[0] == f"text {index} of eight: " + ODD_TEXTS[index % 6]


def test_the_context_limit_ends_an_answer_of_open_length():
    with EngineProcess(*FLAGS, "--max-model-len", "50") as engine, httpx.Client(base_url=engine.url) as http:
        for more in ({}, {"max_tokens": None}, {"max_tokens": 1000}):
            answer = http.post("/v1/completions", json={"prompt": [1, 2], "temperature": 0, "return_token_ids": True} | more).json()
            assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == 50
            assert answer["choices"][0]["token_ids"] == continuation([1, 2], 48)


NULLS = ("stop", "seed", "logit_bias", "top_p", "n", "logprobs", "max_tokens", "temperature", "stream", "stream_options", "user", "model")


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_null_in_any_field_is_its_default(http, route):
    plain = ask(http, route, "one two", False)
    with_nulls = ask(http, route, "one two", False, **{name: None for name in NULLS if name != "stream"})
    assert with_nulls[:3] == plain[:3] and with_nulls[3][0]["usage"] == plain[3][0]["usage"]


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_no_tokens_at_all_can_be_asked_for_with_echo_only(http, route):
    response = http.post(f"/v1/{route}", json=_body(route, "x") | {"max_tokens": 0})
    assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("text", ["xxxxxxxx", "👩‍👩‍👧👩‍👩‍👧", f"a sentence.{END}"])
def test_the_usage_of_a_stream_is_that_of_the_whole_answer_and_comes_last(http, route, text):
    """Also where parts have several tokens, or no text."""
    *_, (whole,) = ask(http, route, text, False, n=2)
    *_, parts = ask(http, route, text, True, n=1, stream_options={"include_usage": True})
    assert parts[-1]["choices"] == [] and all("usage" not in part for part in parts[:-1])
    assert parts[-2]["choices"][0]["finish_reason"] is not None
    single = ask(http, route, text, False)[3][0]["usage"]
    assert parts[-1]["usage"] == single
    both = http.post(f"/v1/{route}", json=_body(route, text) | {"n": 2, "stream": True, "stream_options": {"include_usage": True}})
    last = events(both)[-2]
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == single["prompt_tokens"]
    assert single["completion_tokens"] <= whole["usage"]["completion_tokens"] <= 2 * single["completion_tokens"]
    for more in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        assert not any("usage" in part for part in ask(http, route, text, True, **more)[3])
