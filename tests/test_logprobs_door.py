"""Log-probabilities as clients ask for them and get them."""

import re

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from frontend.admission import Admission, Limits
from frontend.client import Client, EngineError
from frontend.request import Choices, OpenRequest, join_deltas
from frontend.scores import TokenScores
from frontend.tokenizer import ModelTokenizer
from protocol.logprobs import MAX_LOGPROBS, NO_ID, NUM_WORDS, SCORE_BYTES, TokenLogprob, read_score
from protocol.messages import Generate, encode
from protocol.sampling import SamplingParams
from tests import tiny_tokenizers
from tests.checkpoints import tiny_checkpoint
from tests.engine_process import EngineProcess
from tests.scenarios import TINY

PROMPT = [5, 17, 40, 3, 80, 21, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("scored"), "qwen3", **TINY))


@pytest.fixture(scope="module")
def client(folder):
    with EngineProcess("--model", folder, "--dtype", "float32", "--num-threads", "1") as engine, Client(engine.address) as client:
        yield client


def plain(folder: str, tokens: list[int]) -> torch.Tensor:
    """transformers' log-probabilities of all but the first of these tokens, over the vocabulary."""
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def assert_scores(scores: list[TokenLogprob], tokens: list[int], logprobs_LV: torch.Tensor, num_top: int) -> None:
    assert [score.token_id for score in scores] == tokens
    for score, token, logprobs_V in zip(scores, tokens, logprobs_LV, strict=True):
        assert score.logprob == pytest.approx(logprobs_V[token].item(), abs=1e-3)
        assert [value for _, value in score.top] == pytest.approx(logprobs_V.topk(num_top).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("stream", [True, False])
def test_every_token_and_the_prompt_have_their_scores(stream, client, folder):
    outputs = list(client.generate(prompt_ids=PROMPT, max_tokens=9, temperature=0, logprobs=3, prompt_logprobs=2, stream=stream))
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs_LV = plain(folder, PROMPT + tokens)
    scores = [score for output in outputs for score in output.logprobs]
    assert_scores(scores, tokens, logprobs_LV[len(PROMPT) - 1 :], 3)
    assert all(score.rank == 1 and score.top[0] == (score.token_id, score.logprob) for score in scores)
    assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
    first, *others = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert others == [] and first[0] is None
    assert_scores(first[1:], PROMPT[1:], logprobs_LV[: len(PROMPT) - 1], 2)


def test_choices_have_their_own_and_only_who_asks_has_any(client, folder):
    whole = client.complete(prompt_ids=PROMPT, max_tokens=6, n=3, seed=1, logprobs=0, prompt_logprobs=0)
    assert [choice.prompt_logprobs is None for choice in whole.choices] == [False, True, True]
    for choice in whole.choices:
        assert_scores(choice.logprobs, choice.token_ids, plain(folder, PROMPT + choice.token_ids)[len(PROMPT) - 1 :], 0)
    without = client.complete(prompt_ids=PROMPT, max_tokens=6, n=3, seed=1)
    assert without.logprobs is None and without.prompt_logprobs is None
    assert [choice.token_ids for choice in without.choices] == [choice.token_ids for choice in whole.choices]


def test_a_prompt_of_one_token_has_one_score_of_none(client):
    assert client.complete(prompt_ids=[5], max_tokens=1, prompt_logprobs=4).prompt_logprobs == [None]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, MAX_LOGPROBS + 1, 97, 2**40])
def test_values_out_of_bounds_are_refused_with_the_limit(field, value, client):
    with pytest.raises(EngineError, match=re.escape(f"{field} must be between 0 and 20, got {value}")):
        client.complete(prompt_ids=PROMPT, max_tokens=1, **{field: value})


@pytest.mark.parametrize("value", [True, "5", 1.5])
def test_values_of_other_types_are_refused(value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"logprobs": value}, SamplingParams)
    payload = msgspec.msgpack.encode({"type": "Generate", "request_id": 1, "prompt_ids": [1], "sampling": {"logprobs": value}})
    with pytest.raises(msgspec.ValidationError, match="logprobs"):
        msgspec.msgpack.decode(payload, type=Generate)


def test_nobody_pays_for_fields_that_are_not_asked_for():
    admission = Admission(None, frozenset(), Limits(50, 96), None, seed=1)
    assert admission.admit([5], SamplingParams(logprobs=None)).num_logprobs is None
    assert admission.admit([5], SamplingParams(logprobs=0)).num_logprobs == 0
    assert b"logprobs" not in encode(Generate(1, prompt_ids=[5]))


def test_no_more_best_tokens_than_the_vocabulary_has_can_be_asked_for():
    with pytest.raises(ValueError, match="logprobs must be at most 7, the size of the vocabulary, got 8"):
        Admission(None, frozenset(), Limits(50, 7), None, seed=1).admit([5], SamplingParams(logprobs=8))


def test_an_answer_that_is_wanted_whole_keeps_its_scores_packed_until_then():
    told, scores = [], TokenScores(20, None, [1])
    request = OpenRequest(Choices(range(1), 1, told.append), 0, frozenset(), None, [], 0, scores, streams=False)
    for token in range(50):
        request.accept(token, score_of(1))
    assert len(scores.data) == 50 * SCORE_BYTES
    request.finish("length")
    assert len(request.take_delta().scores.read()) == 50 and not scores.data


def score_of(rank: int) -> bytes:
    words = np.full(NUM_WORDS, NO_ID, dtype="<i4")
    words[0], words[1] = rank, np.float32(-0.5).view(np.int32)
    return words.tobytes()


def test_scores_stay_with_their_tokens_when_a_stop_string_ends_the_output():
    tokenizer = ModelTokenizer(tiny_tokenizers.byte_level(), prefix_ids=[])
    ids = tokenizer.encode("a stop b")
    told = []
    request = OpenRequest(
        Choices(range(1), 1, told.append), 0, frozenset(), tokenizer.detokenizer([]), ["stop"], 0, TokenScores(0, None, [1])
    )
    deltas = []
    for rank, token in enumerate(ids):
        request.accept(token, score_of(rank))
        deltas.append(request.take_delta())
        if request.finish_reason is not None:
            request.accept(ids[0], score_of(99))
            break
    whole = join_deltas(deltas)
    assert whole.text == "a " and whole.finish_reason == "stop"
    assert [(score.token_id, score.rank) for score in whole.scores.read()] == [(token, rank) for rank, token in enumerate(whole.token_ids)]


def test_places_without_an_id_are_left_out():
    assert read_score(7, score_of(3), 5) == TokenLogprob(7, -0.5, 3, [])
