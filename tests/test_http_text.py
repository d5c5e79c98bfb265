"""What a client may ask of the text: special tokens, stops that are shown, the model's own defaults, templates."""

import json
from contextlib import contextmanager

import httpx
import pytest

from frontend.client import Client
from frontend.http_bodies import ChatBody, CompletionBody, read_body
from frontend.sampling_defaults import load_defaults
from frontend.tokenizer import ModelTokenizer
from protocol.config import EngineConfig
from protocol.sampling import SamplingParams
from tests import tiny_tokenizers
from tests.scripted_scheduler import text_frontend
from tests.test_http_door import TEMPLATE, events


@contextmanager
def text_door(folder, files: dict[str, str], **options):
    """The URL and the ZMQ address of a door whose model answers a prompt with its own ids."""
    with text_frontend(folder, files, port=0, **options) as frontend:
        with httpx.Client(base_url=f"http://127.0.0.1:{frontend.config.port}", timeout=30) as http:
            yield http, frontend


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    with text_door(tmp_path_factory.mktemp("text"), {"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE})}) as door:
        yield door


@pytest.fixture(scope="module")
def http(door):
    return door[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skips, expected", [(None, "a word"), (True, "a word"), (False, "<s></s>a word<|im_end|>")])
def test_special_tokens_are_shown_as_the_tokenizer_spells_them_where_asked_for(http, stream, skips, expected):
    body = {"prompt": "<s></s>a word<|im_end|>", "skip_special_tokens": skips, "stream": stream}
    response = http.post("/v1/completions", json=body)
    parts = events(response)[:-1] if stream else [response.json()]
    assert "".join(part["choices"][0]["text"] for part in parts) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_the_text_is_shown_where_asked_for(http, stream):
    tokenizer, whole = ModelTokenizer(tiny_tokenizers.byte_level()), "one two three"
    *before, last = tokenizer.encode(whole)
    cases = [
        ({"stop": "two"}, False, "one "), ({"stop": "two"}, True, "one two"),
        ({"stop_token_ids": [last]}, False, tokenizer.decode(before)), ({"stop_token_ids": [last]}, True, whole),
    ]  # fmt: skip
    for stops, shown, expected in cases:
        body = {"prompt": whole, "include_stop_str_in_output": shown, "stream": stream} | stops
        response = http.post("/v1/completions", json=body)
        parts = events(response)[:-1] if stream else [response.json()]
        text = "".join(part["choices"][0]["text"] for part in parts)
        assert text == expected and parts[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_zmq_door_knows_both_too(door):
    with Client(door[1].address) as client:
        assert client.complete("one two three", stop="two", include_stop_str_in_output=True).text == "one two"
        assert client.complete("<s>a</s>", skip_special_tokens=False).text == "<s>a</s>"


def test_a_prompt_that_spells_bos_gets_no_second_one_and_a_switch_leaves_it_out(tmp_path):
    settings = {"chat_template": "<s>" + TEMPLATE, "bos_token": "<s>", "add_bos_token": True}
    with text_door(tmp_path, {"tokenizer_config.json": json.dumps(settings)}) as (http, _):
        bos = http.post("/tokenize", json={"prompt": "<s>", "add_special_tokens": False}).json()["tokens"]

        def count(path: str, **body: object) -> int:
            answer = http.post(path, json=body | {"return_token_ids": True}).json()
            ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
            return ids.count(bos[0])

        assert len(bos) == 1
        assert count("/v1/completions", prompt="a word") == 1
        assert count("/v1/completions", prompt="<s>a word") == 1
        assert count("/v1/completions", prompt="a word", add_special_tokens=False) == 0
        assert count("/v1/chat/completions", messages=[{"role": "user", "content": "a"}]) == 1
        assert http.post("/v1/completions", json={"prompt": ""}).json()["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize("prompt", ["", [""], [[]], [[1, 2], []], ["x", ""]])
def test_an_empty_prompt_is_refused_where_nothing_precedes_it_and_the_next_is_served(http, prompt):
    response = http.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400 and "empty" in response.json()["error"]["message"]
    assert http.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"] == "x"


def test_a_model_without_a_template_says_which_flag_gives_it_one(tmp_path):
    with text_door(tmp_path, {}) as (http, _):
        response = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert response.status_code == 400 and "--chat-template FILE" in response.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_the_template_of_the_flag_takes_the_place_of_the_models(tmp_path):
    files = {"tokenizer_config.json": json.dumps({"chat_template": "never"})}
    template = "{% for m in messages %}[{{ m.name or m.role }}]{{ m.content }}{% endfor %}"
    with text_door(tmp_path, files, chat_template=template) as (http, _):
        messages = [{"role": "user", "content": "x", "name": "Ann"}, {"role": "assistant", "content": None, "refusal": None}]
        answer = http.post("/v1/chat/completions", json={"messages": messages}).json()
        assert answer["choices"][0]["message"]["content"] == "[Ann]x[assistant]"


DEFAULTS = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True, "eos_token_id": 5}


def config_of(folder, **options) -> EngineConfig:
    return EngineConfig(model=str(folder), served_model_name="m", run_dir="", client_address="ipc:///tmp/x", epoch=1, **options)


def test_the_models_sampling_values_fill_what_a_request_leaves_open(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(DEFAULTS))
    defaults = load_defaults(config_of(tmp_path))
    filled = defaults.fill(SamplingParams())
    assert (filled.temperature, filled.top_k, filled.top_p, filled.repetition_penalty) == (0.6, 20, None, 1.1)
    explicit = SamplingParams(temperature=0.0, top_k=0, repetition_penalty=1.0)
    assert defaults.fill(explicit) == explicit
    off = load_defaults(config_of(tmp_path, generation_config="none"))
    assert off.fill(SamplingParams()) == SamplingParams()


def test_they_reach_requests_at_both_doors_and_null_is_not_given(tmp_path):
    with text_door(tmp_path, {"generation_config.json": json.dumps(DEFAULTS)}) as (http, frontend):
        for body in ({}, {"temperature": None}, {"temperature": 0}, {"temperature": 1, "top_k": 0, "repetition_penalty": 1.0}):
            http.post("/v1/completions", json={"prompt": "x", **body})
        with Client(frontend.address) as client:
            client.complete("x")
        got = [(add.sampling.temperature, add.sampling.top_k, add.sampling.repetition_penalty) for add in frontend.scheduler.added]
    assert got == [(0.6, 20, 1.1), (0.6, 20, 1.1), (0.0, 20, 1.1), (1.0, 0, 1.0), (0.6, 20, 1.1)]


@pytest.mark.parametrize("value", [-1, 1e9, "hot"])
def test_a_bad_value_in_the_models_file_ends_the_start_with_its_name(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(ValueError, match="generation_config.json.*temperature"):
        load_defaults(config_of(tmp_path))


def test_fields_that_ask_for_nothing_are_accepted_and_a_switch_passes_over_unknown_ones():
    nothing = {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "suffix": None, "best_of": 1, "user": "x"}
    assert read_body(json.dumps({"prompt": "x", **nothing}).encode(), CompletionBody).prompt == "x"
    assert read_body(b'{"prompt": "x", "nonsense": 1}', CompletionBody, ignores_unknown=True).prompt == "x"
    with pytest.raises(ValueError, match="tools is not supported yet"):
        read_body(b'{"messages": [], "tools": [{"type": "function"}]}', ChatBody, ignores_unknown=True)
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": [], "audio": None}
    assert read_body(json.dumps({"messages": [answer]}).encode(), ChatBody).messages[0].content == "x"
