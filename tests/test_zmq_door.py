"""The ZMQ door of a real frontend process, spoken to in raw frames, with a scheduler that the test plays."""

import json
import random
import re

import msgspec
import pytest

from protocol.messages import Cancel, ChatMessage, Error, Generate, GetInfo, Info, encode, unpack
from protocol.sampling import SamplingParams
from tests import tiny_tokenizers
from tests.raw_client import VERSION, RawClient
from tests.scripted_scheduler import MAX_MODEL_LEN, VOCAB_SIZE, RunningFrontend, text_frontend, wait_until


@pytest.fixture(scope="module")
def frontend(tmp_path_factory):
    with RunningFrontend(tmp_path_factory.mktemp("door")) as running:
        yield running


@pytest.fixture
def client(frontend):
    with RawClient(frontend.address) as raw:
        yield raw


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    with text_frontend(tmp_path_factory.mktemp("texts"), {"config.json": json.dumps({"eos_token_id": 1})}) as running:
        yield running


# ---- requests and outputs -----------------------------------------------------------------------------------------


def test_a_stream_is_numbered_and_ends_with_reason_and_usage(client):
    client.send(Generate(3, prompt_ids=[10, 20], sampling=SamplingParams(max_tokens=20)))
    outputs = client.outputs(3)
    assert [output.seq for output in outputs] == list(range(len(outputs)))
    assert [token for output in outputs for token in output.token_ids] == list(range(21, 41))
    assert outputs[-1].finish_reason == "length"
    assert msgspec.to_builtins(outputs[-1].usage) == {"prompt_tokens": 2, "completion_tokens": 20, "cached_tokens": 0}


def test_without_streaming_there_is_one_output_and_it_is_the_same(client):
    client.send(Generate(4, prompt_ids=[10, 20], sampling=SamplingParams(max_tokens=20), stream=False))
    (output,) = client.outputs(4)
    assert (output.seq, output.token_ids, output.finish_reason) == (0, list(range(21, 41)), "length")


def test_an_end_id_is_delivered_and_counted(client):
    client.send(Generate(5, prompt_ids=[10], sampling=SamplingParams(stop_token_ids=[15]), stream=False))
    (output,) = client.outputs(5)
    assert (output.token_ids, output.finish_reason, output.usage.completion_tokens) == ([11, 12, 13, 14, 15], "stop", 5)


def test_two_clients_with_the_same_ids_get_their_own_answers(frontend, client):
    with RawClient(frontend.address) as other:
        for request_id in range(20):
            client.send(Generate(request_id, prompt_ids=[request_id], sampling=SamplingParams(max_tokens=3), stream=False))
            other.send(Generate(request_id, prompt_ids=[500 + request_id], sampling=SamplingParams(max_tokens=3), stream=False))
        for raw, first in ((client, 1), (other, 501)):
            replies = {reply.request_id: reply.token_ids for reply in (raw.receive() for _ in range(20))}
            assert replies == {index: [first + index, first + index + 1, first + index + 2] for index in range(20)}


def test_a_request_id_in_use_is_refused_and_free_again_after_cancel(frontend, client):
    frontend.scheduler.paused = True
    client.send(Generate(1, prompt_ids=[5], stream=False))
    client.send(Generate(1, prompt_ids=[6], stream=False))
    refusal = client.receive()
    assert (refusal.request_id, refusal.code) == (1, 409)
    client.send(Cancel(1))
    client.send(Generate(1, prompt_ids=[7], sampling=SamplingParams(max_tokens=1), stream=False))
    assert client.receive().finish_reason == "abort"
    frontend.scheduler.paused = False
    assert client.receive().token_ids == [8]


def test_what_the_scheduler_gets_is_resolved(frontend, client):
    client.send(Generate(1, prompt_ids=[5, 6], sampling=SamplingParams(max_tokens=10**6, temperature=0.5, seed=-3), stream=False))
    client.receive()
    added = frontend.scheduler.added[-1]
    assert unpack(added.prompt).tolist() == [5, 6] and added.generated == b""
    assert (added.max_tokens, added.sampling.seed, added.sampling.temperature) == (MAX_MODEL_LEN - 2, -3, 0.5)


def test_info_tells_limits_and_statistics(client):
    client.send(GetInfo())
    info = client.receive()
    assert isinstance(info, Info) and (info.model, info.max_model_len, info.vocab_size) == ("scripted", MAX_MODEL_LEN, VOCAB_SIZE)
    assert {"num_running", "free_blocks", "open_requests", "num_malformed_client"} <= info.stats.keys()


# ---- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_text_ends_right_before_a_stop_string_and_the_scheduler_is_told(texts, stream):
    with RawClient(texts.address) as raw:
        raw.send(Generate(1, prompt="one two three four five", sampling=SamplingParams(stop=["four", "ee f"]), stream=stream))
        outputs = raw.outputs(1)
    assert "".join(output.text for output in outputs) == "one two thr"
    assert outputs[-1].finish_reason == "stop"
    num_tokens = sum(len(output.token_ids) for output in outputs)
    assert outputs[-1].usage.completion_tokens == num_tokens < len(unpack(texts.scheduler.added[-1].prompt))
    assert wait_until(lambda: texts.scheduler.added[-1].handle in texts.scheduler.aborted)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "prompt, sampling, text",
    [
        ("Größe 日本語 👩‍👩‍👧", SamplingParams(), "Größe 日本語 👩‍👩‍👧"),
        ("A sentence.</s> more", SamplingParams(), "A sentence."),
        ("A sentence.</s> more", SamplingParams(ignore_eos=True), "A sentence. more"),
        ("A turn.<|im_end|> more", SamplingParams(stop="<|im_end|>"), "A turn."),
        ("half a st", SamplingParams(stop="stop"), "half a st"),
    ],
)
def test_text_is_whole_and_ends_where_it_should(texts, prompt, sampling, text, stream):
    with RawClient(texts.address) as raw:
        raw.send(Generate(1, prompt=prompt, sampling=sampling, stream=stream))
        assert "".join(output.text for output in raw.outputs(1)) == text


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_ids_own_text_is_left_out_and_nothing_before_it(texts, stream):
    (dot,) = tiny_tokenizers.byte_level().encode(".").ids
    with RawClient(texts.address) as raw:
        raw.send(Generate(1, prompt="One. Two.", sampling=SamplingParams(stop_token_ids=[dot]), stream=stream))
        outputs = raw.outputs(1)
    assert "".join(output.text for output in outputs) == "One"
    assert outputs[-1].token_ids[-1] == dot and outputs[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_an_incomplete_last_character_is_let_go_at_the_end(texts, stream):
    ids = tiny_tokenizers.byte_level().encode("ok 龍").ids
    with RawClient(texts.address) as raw:
        raw.send(Generate(1, prompt_ids=ids[:-1], stream=stream))
        assert "".join(output.text for output in raw.outputs(1)) == "ok \ufffd"


def test_the_scheduler_learns_the_tokenizers_size(texts, frontend):
    assert texts.scheduler.tokenizer_size == tiny_tokenizers.byte_level().get_vocab_size()
    assert frontend.scheduler.tokenizer_size == 0


def test_a_request_cancelled_while_its_text_is_tokenised_never_reaches_the_scheduler(texts):
    with RawClient(texts.address) as raw:
        before = len(texts.scheduler.added)
        raw.send(Generate(1, prompt="x" * 10_000))
        raw.send(Cancel(1))
        assert raw.receive().finish_reason == "abort"
        raw.send(Generate(2, prompt="y", stream=False))
        assert raw.receive().text == "y"
        assert len(texts.scheduler.added) == before + 1


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_fields, reason",
    [
        ({}, "exactly one of prompt, prompt_ids and messages, got none"),
        ({"prompt": "a"}, "no tokenizer; send prompt_ids"),
        ({"messages": [ChatMessage("user", "a")]}, "no tokenizer; send prompt_ids"),
        ({"prompt_ids": []}, "the prompt is empty"),
        ({"prompt_ids": [VOCAB_SIZE]}, f"between 0 and {VOCAB_SIZE - 1}, got {VOCAB_SIZE}"),
        ({"prompt_ids": [2**63]}, "got 9223372036854775808"),
        ({"prompt_ids": [1] * MAX_MODEL_LEN}, f"has {MAX_MODEL_LEN} tokens.* context length of {MAX_MODEL_LEN}"),
        ({"prompt_ids": [1], "sampling": SamplingParams(max_tokens=0)}, "max_tokens must be between 1 and .*, got 0"),
        ({"prompt_ids": [1], "sampling": SamplingParams(top_p=float("nan"))}, "top_p must be between 0.0 and 1.0, got nan"),
        ({"prompt_ids": [1], "sampling": SamplingParams(stop=["a"] * 5)}, "stop takes at most 4 strings, got 5"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(client, request_fields, reason):
    client.send(Generate(77, **request_fields))
    reply = client.receive()
    assert isinstance(reply, Error) and (reply.request_id, reply.code) == (77, 400)
    assert re.search(reason, reply.message)
    assert client.serves()


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"prompt_ids": [1.5]}, "prompt_ids"),
        ({"prompt_ids": [True]}, "prompt_ids"),
        ({"prompt_ids": "text"}, "prompt_ids"),
        ({"prompt_ids": [1], "sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"prompt_ids": [1], "sampling": {"best_of": 2}}, "best_of"),
        ({"prompt_ids": [1], "prompt_embeds": [0.0]}, "prompt_embeds"),
    ],
)
def test_type_errors_name_the_field_and_the_request(client, fields, reason):
    payload = msgspec.msgpack.encode({"type": "Generate", "request_id": 55, **fields})
    client.socket.send_multipart([VERSION, payload])
    reply = client.receive()
    assert isinstance(reply, Error) and (reply.request_id, reply.code) == (55, 400) and reason in reply.message


def random_garbage(rng: random.Random) -> list[bytes]:
    good = encode(Generate(1, prompt_ids=[1, 2, 3]))
    flipped = bytearray(good)
    flipped[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
    nested, long = b"\x91" * 200_000, b"\xdf\xff\xff\xff\xff"
    payload = rng.choice([b"", rng.randbytes(rng.randint(1, 40)), bytes(flipped), good + b"\0", nested, long])
    shapes = [[payload], [VERSION, payload], [b"\x02", payload], [VERSION, payload, payload], [b""], [VERSION], [b"x"] * 50]
    return rng.choice(shapes)


def test_no_frame_hurts_the_door_or_a_neighbour(frontend, client):
    rng = random.Random(9)
    with RawClient(frontend.address) as vandal:
        for index in range(1500):
            vandal.socket.send_multipart(random_garbage(rng))
            if index % 500 == 0:
                assert client.serves()
        while vandal.receive(0.2) is not None:
            pass
        for request_id in range(2**8):  # what a flipped bit may have made of the good one
            vandal.send(Cancel(request_id))
    assert client.serves() and frontend.process.poll() is None
    client.send(GetInfo())
    assert client.receive().stats["num_malformed_client"] > 500


def test_a_frame_too_long_costs_its_sender_the_connection_only(frontend, client):
    with RawClient(frontend.address) as vandal:
        vandal.socket.send_multipart([VERSION, bytes(9 << 20)])
        assert client.serves()
