"""Every field of a request at both doors, at and beyond its bounds: an error at once that names it, and nobody else is hurt."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from math import inf, isfinite, nan
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from frontend.client import Client
from tests import tiny_tokenizers
from tests.checkpoints import tiny_checkpoint
from tests.engine_process import EngineProcess
from tests.raw_client import VERSION, RawClient
from tests.test_checksum_engine import assert_back_to_start, idle_stats

REFUSAL_SECONDS = 0.05
VOCAB_SIZE, NUM_NEW = 600, 2
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NULL_IS_REFUSED = "null is refused"


class Field(NamedTuple):
    """A field whose numbers lie between low and high; `wrap` puts one where it belongs."""

    name: str
    low: float
    high: float
    kind: type = int
    wrap: Callable[[Any], Any] = lambda value: value
    null: str = ""


FIELDS = [
    Field("max_tokens", 1, 2**31 - 1), Field("top_k", -1, 2**31 - 1), Field("seed", -(2**63), 2**63 - 1), Field("n", 1, 128),
    Field("min_tokens", 0, NUM_NEW), Field("prompt_logprobs", 0, 20), Field("temperature", 0, 1000, float), Field("top_p", 0, 1, float),
    Field("min_p", 0, 1, float), Field("repetition_penalty", 0.01, 10, float), Field("presence_penalty", -2, 2, float),
    Field("frequency_penalty", -2, 2, float),
    Field("stop_token_ids", 0, VOCAB_SIZE - 1, int, lambda value: [5, value], NULL_IS_REFUSED),
    Field("allowed_token_ids", 0, VOCAB_SIZE - 1, int, lambda value: [5, value], NULL_IS_REFUSED),
    Field("logit_bias", -100, 100, float, lambda value: {"7": value}, NULL_IS_REFUSED),
]  # fmt: skip
PRIORITY = Field("priority", 0, 0)
IDS = Field("prompt", 0, VOCAB_SIZE - 1, int, lambda value: [5, value, 7], NULL_IS_REFUSED)
OF_HTTP = [PRIORITY, *FIELDS]
OF_COMPLETIONS = [*OF_HTTP, IDS, Field("logprobs", 0, 20)]
OF_CHATS = [*OF_HTTP, Field("max_completion_tokens", 1, 2**31 - 1), Field("top_logprobs", 0, 20)]
OF_ZMQ = [*FIELDS, Field("logprobs", 0, 20)]
SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
HTTP_SWITCHES = (*SWITCHES, "stream", "return_token_ids", "add_special_tokens")
TEXTS = ("stop", "bad_words", "cache_salt")


def values(field: Field) -> list[Any]:
    around = [field.low - 1, field.low, field.high, field.high + 1]
    return [-1, 0, 1, *around, 2**31, 2**63, nan, inf, -inf, "text", True, [[]], {"a": 1}, None]


def is_right(field: Field, value: object) -> bool:
    if value is None:
        return not field.null
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    is_of_kind = field.kind is float or isinstance(value, int)
    return is_of_kind and isfinite(value) and field.low <= value <= field.high


def cases(fields: list[Field], switches: tuple[str, ...]) -> Iterator[tuple[str, Any, bool]]:
    """Field, value, and whether it is taken."""
    for field in fields:
        for value in values(field):
            yield field.name, field.wrap(value), is_right(field, value)
    for name in switches:
        for value in (0, 1, -1, "true", [], nan, 2**63):
            yield name, value, False
    for name in TEXTS:
        for value in (0, -1, 2**63, nan, {"a": 1}, "x" * 300 if name != "bad_words" else ["x" * 300]):
            yield name, value, False
    for value in ("", ["a", ""], ["a"] * 5, [None], [1], True):
        yield "stop", value, False


class Neighbours:
    """Two clients, one at each door, whose greedy streams go on and on and are always the same."""

    def __init__(self, engine: EngineProcess):
        self.engine, self.rounds, self.faults, self.is_over = engine, [0, 0], [], False
        self.threads = [threading.Thread(target=self._run, args=(index, read)) for index, read in enumerate((self._http, self._zmq))]

    def _http(self) -> list[int]:
        body = {"prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0, "stream": True, "return_token_ids": True}
        frames = httpx.post(f"{self.engine.url}/v1/completions", json=body, timeout=20).text.split("\n\n")
        return [token for frame in frames[:-2] for token in json.loads(frame[6:])["choices"][0]["token_ids"]]

    def _zmq(self) -> list[int]:
        with Client(self.engine.address) as client:
            outputs = client.generate(prompt_ids=[1, 2, 3], max_tokens=40, temperature=0.0)
            return [token for output in outputs for token in output.token_ids]

    def _run(self, index: int, read: Callable[[], list[int]]) -> None:
        first = read()
        try:
            while not self.is_over:
                assert read() == first and len(first) == 40
                self.rounds[index] += 1
        except Exception as error:
            self.faults.append(error)

    def __enter__(self) -> None:
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        for thread in self.threads:
            thread.join()
        assert not self.faults and min(self.rounds) >= 1, (self.faults, self.rounds)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("bounds"), vocab_size=VOCAB_SIZE)
    tiny_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with EngineProcess("--model", str(folder), "--num-threads", "1", "--max-num-seqs", "32") as engine:
        yield engine
        with Client(engine.address) as client:
            assert_back_to_start(idle_stats(client))


def quickest_refusal(send: Callable[[], tuple[bool, str]], seconds: float = REFUSAL_SECONDS) -> tuple[str, float]:
    """What it says, and the least time of up to three tries: others compute on the same cores."""
    least = inf
    for _ in range(3):
        began = time.monotonic()
        is_taken, message = send()
        assert not is_taken
        least = min(least, time.monotonic() - began)
        if least < seconds:
            break
    return message, least


def check_all(send: Callable[[str, Any], tuple[bool, str]], fields: list[Field], switches: tuple[str, ...]) -> None:
    """Send every case; collect what is wrong, so that one fault hides no other."""
    wrong = []
    for name, value, is_right in cases(fields, switches):
        try:
            if is_right:
                is_taken, message = send(name, value)
                fault = "" if is_taken else f"refused: {message}"
            else:
                message, seconds = quickest_refusal(lambda: send(name, value))
                fault = "" if seconds < REFUSAL_SECONDS else f"took {seconds:.3f} s"
                if name not in message:
                    fault += f" does not name the field: {message}"
        except OverflowError:
            continue  # this door's encoding has no such number
        if fault:
            wrong.append((name, value, fault))
    assert not wrong, "\n".join(f"{name}={str(value)[:60]}: {fault}" for name, value, fault in wrong)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_every_field_over_http(engine, route):
    is_chat = route.startswith("chat")
    base = {"messages": [{"role": "user", "content": "x"}], "logprobs": True} if is_chat else {"prompt": [5, 6]}

    with httpx.Client(base_url=engine.url, timeout=20) as http, Neighbours(engine):

        def send(name: str, value: object) -> tuple[bool, str]:
            body = base | ({"max_tokens": NUM_NEW} if name != "max_completion_tokens" else {}) | {name: value}
            response = http.post(f"/v1/{route}", content=json.dumps(body))  # NaN and infinities as Python spells them
            if response.status_code == 200:
                return True, ""
            error = response.json()["error"]
            assert response.status_code == error["code"] == 400, response.text
            return False, error["message"]

        check_all(send, OF_CHATS if is_chat else OF_COMPLETIONS, HTTP_SWITCHES)


def test_every_field_over_zmq(engine):
    with RawClient(engine.address) as client, Neighbours(engine):
        next_id = iter(range(1, 10**9))

        def send(name: str, value: object) -> tuple[bool, str]:
            number = next(next_id)
            message = {"type": "Generate", "request_id": number, "prompt_ids": [5, 6], "stream": False}
            sampling = {"max_tokens": NUM_NEW}
            (message if name in ("prompt_ids", "cache_salt", "priority") else sampling)[name] = value
            client.socket.send_multipart([VERSION, msgspec.msgpack.encode(message | {"sampling": sampling})])
            while True:
                reply = client.receive(10)
                assert reply is not None and reply.request_id == number
                if hasattr(reply, "code"):
                    assert reply.code == 400
                    return False, reply.message
                if reply.usage is not None:
                    return True, ""

        check_all(send, [*OF_ZMQ, PRIORITY._replace(null=NULL_IS_REFUSED), IDS._replace(name="prompt_ids")], SWITCHES)


@pytest.mark.parametrize("raw", ["1e999", "-1e999", "1" + "0" * 400, "0x10", "01", "+1", "1_000", "Infinity", '"\\ud800"'])
def test_numbers_that_json_does_not_have_are_refused(engine, raw):
    response = httpx.post(f"{engine.url}/v1/completions", content=f'{{"prompt": [5], "max_tokens": 2, "temperature": {raw}}}')
    assert response.status_code == response.json()["error"]["code"] == 400


@pytest.mark.parametrize(
    "bad", [{"n": 0}, {"n": -1}, {"temperature": -1}, {"top_p": 2}, {"model": "other"}, {"prompt": [5] * 600}, {"max_tokens": 0}]
)
def test_a_bad_stream_is_a_plain_error_before_any_event(engine, bad):
    began = time.monotonic()
    response = httpx.post(f"{engine.url}/v1/completions", json={"prompt": [5], "max_tokens": 2, "stream": True} | bad)
    assert response.status_code == (404 if "model" in bad else 400) and response.headers["content-type"] == "application/json"
    assert response.json()["error"]["message"] and time.monotonic() - began < 1
