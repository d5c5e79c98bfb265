"""Log-probabilities, echo and tokens at the HTTP door, beside a real model with a tokenizer."""

import json
import math

import httpx
import pytest

from frontend.client import Client
from tests import tiny_tokenizers
from tests.checkpoints import tiny_checkpoint
from tests.engine_process import EngineProcess
from tests.scenarios import TINY
from tests.test_http_door import TEMPLATE, events

PROMPT = "Größe 日本 🎉 of the text"
NUM_IDS = 620  # more than the tokenizer has


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("scored"), "qwen3", **(TINY | {"vocab_size": NUM_IDS}))
    tiny_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with EngineProcess("--model", str(folder), "--dtype", "float32", "--num-threads", "1", "--block-size", "4") as process:
        yield process


@pytest.fixture(scope="module")
def http(engine):
    with httpx.Client(base_url=engine.url, timeout=30) as client:
        yield client


def complete(http: httpx.Client, **body: object) -> dict:
    response = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, "seed": 3, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_a_completions_scores_are_those_of_the_zmq_door(engine, http):
    choice = complete(http, logprobs=3, return_token_ids=True)
    with Client(engine.address) as client:
        same = client.complete(PROMPT, max_tokens=12, seed=3, logprobs=3)
    scores = choice["logprobs"]
    assert choice["token_ids"] == same.token_ids and choice["text"] == same.text
    assert scores["token_logprobs"] == pytest.approx([score.logprob for score in same.logprobs], abs=1e-4)
    for best, score, token in zip(scores["top_logprobs"], same.logprobs, scores["tokens"], strict=True):
        assert sorted(best.values())[-3:] == pytest.approx(sorted(value for _, value in score.top), abs=1e-4)
        assert token in best and 3 <= len(best) <= 4
    starts = scores["text_offset"]
    assert starts[0] == 0 and starts == sorted(starts) and starts[-1] <= len(choice["text"])


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_a_chats_tokens_are_its_content(http, stream):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60, "seed": 1, "logprobs": True, "top_logprobs": 5}
    if stream:
        *chunks, done = events(http.post("/v1/chat/completions", json=body | {"stream": True}))
        content = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        entries = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    else:
        (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
        content, entries = choice["message"]["content"], choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace") == content
    assert len(entries) == 60 and any(entry["token"].startswith("bytes:") for entry in entries)
    for entry in entries:
        assert len(entry["top_logprobs"]) == 5 and {"token", "logprob", "bytes"} == set(entry["top_logprobs"][0])
        total = sum(math.exp(best["logprob"]) for best in entry["top_logprobs"])
        assert total <= 1.0001 and -9999 <= entry["logprob"] <= 0


def test_without_top_logprobs_a_chat_has_the_tokens_own_only(http):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True}
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]
    (choice,) = http.post("/v1/chat/completions", json=body | {"logprobs": False}).json()["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_gives_the_prompt_with_its_scores_twice_alike(http, max_tokens):
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    first, again = (complete(http, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0) for _ in range(2))
    scores = first["logprobs"]
    assert first["text"].startswith(PROMPT) and (max_tokens or first["text"] == PROMPT)
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["text_offset"]) == len(ids) + max_tokens
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None and None not in scores["token_logprobs"][1:]
    assert again["logprobs"]["token_logprobs"][1:] == pytest.approx(scores["token_logprobs"][1:], abs=1e-4)
    assert (first["finish_reason"], scores["text_offset"][len(ids) :][:1]) == ("length", [len(PROMPT)] if max_tokens else [])
    whole = http.post("/v1/completions", json={"prompt": ids, "echo": True, "max_tokens": max_tokens or 0}).json()
    assert whole["choices"][0]["text"].startswith(PROMPT) and whole["usage"]["completion_tokens"] == max_tokens


def test_every_choice_of_a_streamed_echo_has_the_prompt_and_its_scores(http):
    body = {"prompt": [PROMPT, "two"], "echo": True, "logprobs": 0, "n": 3, "max_tokens": 5, "stream": True, "seed": 2}
    *chunks, done = events(http.post("/v1/completions", json=body))
    whole = http.post("/v1/completions", json=body | {"stream": False}).json()["choices"]
    for index in range(6):
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == whole[index]["text"]
        for key in ("tokens", "text_offset"):
            assert [entry for part in parts for entry in part["logprobs"][key]] == whole[index]["logprobs"][key]
    assert [choice["text"].startswith(PROMPT) for choice in whole] == [True] * 3 + [False] * 3


def test_prompt_logprobs_are_told_beside_the_answer_in_vllms_shape(http):
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    choice = complete(http, prompt_logprobs=2, return_token_ids=True)
    assert choice["prompt_token_ids"] == ids and choice["prompt_logprobs"][0] is None
    for token, scores in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
        assert 2 <= len(scores) <= 3 and set(scores[str(token)]) == {"logprob", "rank", "decoded_token"}
    chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 0})
    assert len(chat.json()["prompt_logprobs"]) == chat.json()["usage"]["prompt_tokens"]


REFUSED = [
    ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21"), ({"logprobs": -1}, "logprobs must be between 0 and 20, got -1"),
    ({"logprobs": True}, "Expected `int | null`, got `bool`"), ({"max_tokens": 0}, "max_tokens must be between 1"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs must be left out of streams"), ({"echo": 1}, "Expected `bool | null`"),
]  # fmt: skip
REFUSED_IN_CHATS = [
    ({"top_logprobs": 5}, "top_logprobs must be left out unless logprobs is true, got 5"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs must be between 0 and 20, got 21"), ({"logprobs": 1}, "Expected `bool | null`"),
    ({"logprobs": True, "top_logprobs": -1}, "logprobs must be between 0 and 20, got -1"), ({"echo": True}, "unknown field `echo`"),
    ({"max_tokens": 0}, "max_tokens must be between 1"),
]  # fmt: skip


@pytest.mark.parametrize("is_chat, body, message", [(False, *case) for case in REFUSED] + [(True, *case) for case in REFUSED_IN_CHATS])
def test_scores_out_of_bounds_are_refused_before_any_event(http, is_chat, body, message):
    path, prompt = ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}) if is_chat else ("completions", {"prompt": "x"})
    response = http.post(f"/v1/{path}", json=prompt | {"stream": True} | body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_ids_that_the_tokenizer_lacks_are_never_chosen_and_named_without_harm(http):
    bias = {str(token): 100.0 for token in range(600, NUM_IDS)}
    choice = complete(http, logprobs=20, logit_bias=bias, temperature=100, return_token_ids=True)
    assert max(choice["token_ids"]) < 600 and json.dumps(choice["logprobs"])


def test_text_goes_to_ids_and_back(http):
    whole = http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert whole["count"] == len(whole["tokens"]) == len(whole["token_strs"]) and whole["max_model_len"] > 0
    assert http.post("/detokenize", json={"tokens": whole["tokens"]}).json() == {"prompt": PROMPT}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": "user:x;"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    for body in ({"tokens": [NUM_IDS]}, {"tokens": [-1]}, {"tokens": [2**63]}, {"tokens": "x"}, {}):
        assert http.post("/detokenize", json=body).status_code == 400
    for body in ({}, {"prompt": "x", "messages": []}, {"prompt": 5}):
        assert http.post("/tokenize", json=body).status_code == 400
