"""Sampling controls at the door: what is refused, and what the worker gets of the rest."""

import re

import msgspec
import numpy as np
import pytest

from frontend.admission import Admission, Limits
from frontend.controls import bad_word_ids
from frontend.request import Choices, OpenRequest
from frontend.scores import TokenScores
from frontend.tokenizer import ModelTokenizer
from protocol.messages import Error, Generate, unpack
from protocol.sampling import SamplingParams
from tests import tiny_tokenizers
from tests.raw_client import RawClient
from tests.scripted_scheduler import RunningFrontend, wait_until

VOCAB_SIZE, MAX_MODEL_LEN = 600, 50


def make_admission(tokenizer: ModelTokenizer | None, vocab_size: int = VOCAB_SIZE) -> Admission:
    return Admission(tokenizer, frozenset({1, 7}), Limits(MAX_MODEL_LEN, vocab_size), None, seed=3)


@pytest.fixture(scope="module")
def byte_level() -> ModelTokenizer:
    return ModelTokenizer(tiny_tokenizers.byte_level(), prefix_ids=[0])


@pytest.fixture
def admission(byte_level) -> Admission:
    return make_admission(byte_level)


REFUSED = [
    ({"repetition_penalty": 0.0}, "repetition_penalty must be between 0.01 and 10.0, got 0.0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty .* got -1.0"),
    ({"repetition_penalty": float("nan")}, "repetition_penalty .* got nan"),
    ({"presence_penalty": 2.5}, "presence_penalty must be between -2.0 and 2.0, got 2.5"),
    ({"frequency_penalty": float("-inf")}, "frequency_penalty must be between -2.0 and 2.0, got -inf"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias must have ids between 0 and 599 as keys, got 600"),
    ({"logit_bias": {10**9: 1.0}}, "between 0 and 599 as keys, got 1000000000"),
    ({"logit_bias": {"-1": 1.0}}, "between 0 and 599 as keys, got -1"),
    ({"logit_bias": {"abc": 1.0}}, "logit_bias must have token ids as keys, got 'abc'"),
    ({"logit_bias": {"1.5": 1.0}}, "token ids as keys, got '1.5'"),
    ({"logit_bias": {"٣": 1.0}}, "token ids as keys"),
    ({"logit_bias": {"9" * 5000: 1.0}}, "token ids as keys"),
    ({"logit_bias": {"5": 1.0, 5: 2.0}}, "logit_bias must name each id once"),
    ({"logit_bias": {5: 1000.0}}, "logit_bias must hold values between -100.0 and 100.0, got 1000.0 for id 5"),
    ({"logit_bias": {5: float("nan")}}, "got nan for id 5"),
    ({"logit_bias": {i: 1.0 for i in range(301)}}, "logit_bias takes at most 300 entries, got 301"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids must hold ids between 0 and 599, got 600"),
    ({"allowed_token_ids": [5] * 601}, "allowed_token_ids takes at most 600 ids, got 601"),
    ({"allowed_token_ids": [1, 7], "min_tokens": 1}, "leaves no token to choose"),
    ({"bad_words": [""]}, "bad_words must hold strings of 1 to 256 bytes, got one of 0"),
    ({"bad_words": ["x" * 257]}, "got one of 257"),
    ({"bad_words": ["a"] * 65}, "bad_words takes at most 64 strings, got 65"),
    ({"bad_words": ["\u4e57" * 30]}, "of 1 to 16 tokens, .* has 9"),
    ({"bad_words": ["ab\ud800"]}, "lone surrogate"),
    ({"min_tokens": -1}, "min_tokens must be between 0 and"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens must be at most 5, max_tokens, got 6"),
    ({"min_tokens": MAX_MODEL_LEN}, "min_tokens must be at most 49, the room that the prompt leaves, got 50"),
]  # fmt: skip


@pytest.mark.parametrize("fields, reason", REFUSED)
def test_what_is_out_of_bounds_is_refused_with_field_value_and_limit(admission, fields, reason):
    with pytest.raises(ValueError, match=reason):
        admission.admit([5], SamplingParams(**fields))


@pytest.mark.parametrize("fields", [
    {}, {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}, {"logit_bias": {}}, {"bad_words": []},
    {"min_tokens": 0}, {"min_tokens": 3, "ignore_eos": True}, {"temperature": 0.5, "top_k": 3, "stop": "x", "stop_token_ids": [4]},
])  # fmt: skip
def test_requests_without_controls_carry_none(admission, fields):
    assert admission.admit([5], SamplingParams(**fields)).controls is None


def test_json_has_the_ids_of_a_bias_as_text(admission):
    params = msgspec.json.decode(b'{"logit_bias": {"17": -100, "599": 2.5, "0": 0.1}}', type=SamplingParams)
    assert params.logit_bias == {"17": -100.0, "599": 2.5, "0": 0.1}
    controls = admission.admit([5], params).controls
    assert unpack(controls.bias_ids).tolist() == [17, 599, 0] and not controls.needs_tokens
    assert np.frombuffer(controls.bias_values, "<f4").tolist() == pytest.approx([-100.0, 2.5, 0.1])
    by_number = admission.admit([5], SamplingParams(logit_bias={17: -100, 599: 2.5, 0: 0.1}))
    assert by_number.controls == controls


@pytest.mark.parametrize("value", ["null", '"1"', "[1]"])
def test_a_bias_that_is_no_number_is_refused_by_type(value):
    with pytest.raises(msgspec.ValidationError, match="logit_bias"):
        msgspec.json.decode(f'{{"logit_bias": {{"1": {value}}}}}', type=SamplingParams)


@pytest.mark.parametrize("make", [tiny_tokenizers.byte_level, tiny_tokenizers.metaspace])
def test_bad_words_are_banned_as_given_and_after_a_space(make):
    """Both spellings, which differ in tokens and in their number, and neither with a prefix."""
    tokenizer = ModelTokenizer(make(), prefix_ids=[2])
    for word in ("return", "London", "self", "New York", " return", "\x01"):
        forms = [word, " " + word.lstrip()]
        expected = {tuple(tokenizer.backend.encode(form, add_special_tokens=False).ids) for form in forms}
        assert set(bad_word_ids([word], tokenizer)) == expected
    assert {len(ids) for ids in bad_word_ids(["return", "London"], tokenizer)} != {1}
    assert len(bad_word_ids(["a", "b"] * 20, tokenizer)) == len(bad_word_ids(["a", "b"], tokenizer))


def test_bad_words_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="no tokenizer, which bad_words need"):
        make_admission(None).admit([5], SamplingParams(bad_words=["x"]))


def test_ids_beyond_the_models_vocabulary_never_reach_the_worker(byte_level):
    """A tokenizer or a configuration may know more ids than the model has."""
    admission = make_admission(byte_level, vocab_size=300)
    admission.model_end_ids = frozenset({1, 5000})
    controls = admission.admit([5], SamplingParams(min_tokens=2, bad_words=["return"])).controls
    assert unpack(controls.end_ids).tolist() == [1]
    assert all(unpack(ids).max() < 300 for ids in controls.bad_words)


def test_min_tokens_covers_the_models_ends_and_the_clients(admission):
    admitted = admission.admit([5], SamplingParams(min_tokens=4, stop_token_ids=[30], stop="</s>", max_tokens=9))
    assert set(unpack(admitted.controls.end_ids).tolist()) == set(admitted.end_ids) == {1, 7, 30}
    assert admitted.sampling.min_tokens == 4
    ignoring = admission.admit([5], SamplingParams(min_tokens=4, stop_token_ids=[599], ignore_eos=True))
    assert unpack(ignoring.controls.end_ids).tolist() == [599]


@pytest.mark.parametrize("min_tokens, shown, reason", [
    (0, "ab", "stop"), (2, "ab", "stop"), (3, "abXab", "stop"), (5, "abXab", "stop"), (6, "abXabX", "length"), (9, "abXabX", "length"),
])  # fmt: skip
def test_stop_strings_are_looked_for_behind_min_tokens(min_tokens, shown, reason, byte_level):
    ids = [byte_level.backend.encode(letter, add_special_tokens=False).ids[0] for letter in "abXabX"]
    scores = TokenScores(None, None, [])
    request = OpenRequest(Choices(range(1), 1, None), 0, frozenset(), byte_level.detokenizer([]), ["X"], min_tokens, scores)
    for token in ids:
        request.accept(token)
    request.finish("length")
    assert (request.text, request.finish_reason) == (shown, reason)


def test_controls_pass_from_the_client_to_the_scheduler(tmp_path):
    """Over the sockets, with the ids of a bias as text and as numbers."""
    with RunningFrontend(tmp_path) as frontend, RawClient(frontend.address) as client:
        sampling = SamplingParams(
            max_tokens=2, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, min_tokens=1, stop_token_ids=[9],
            logit_bias={"3": 1.0, 4: 2.0}, allowed_token_ids=[8, 3, 8],
        )  # fmt: skip
        client.send(Generate(1, prompt_ids=[10], sampling=sampling, stream=False))
        assert client.receive().finish_reason == "length"
        added = frontend.scheduler.added[-1]
        assert msgspec.to_builtins(added.sampling)[5:9] == [1.5, 0.5, -0.5, 1]
        controls = added.controls
        assert [unpack(ids).tolist() for ids in (controls.bias_ids, controls.allowed_ids, controls.end_ids)] == [[3, 4], [3, 8], [9]]
        assert controls.needs_tokens and controls.tokens == b""
        client.send(Generate(2, prompt_ids=[10], sampling=SamplingParams(logit_bias={1000: 1.0})))
        reply = client.receive()
        assert isinstance(reply, Error) and reply.code == 400 and re.search("between 0 and 999", reply.message)
        assert client.serves() and wait_until(lambda: frontend.scheduler.added[-1].controls is None)
