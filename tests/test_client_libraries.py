"""The client libraries that people have, pinned by hash in an environment of their own, against SmolLM2 behind the HTTP door."""

import json
import os
import re
import subprocess
from collections.abc import Callable

import pytest

from frontend.client import Client
from tests.client_scripts.common import LENGTH, MESSAGES, MODEL, PROMPT
from tests.engine_process import ROOT, EngineProcess

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
KEY = "a-key-of-the-tests"
pytestmark = pytest.mark.skipif(not (ROOT / ".venv-clients" / "installed").exists(), reason="needs `make .venv-clients/installed`")

Results = dict[str, object]


@pytest.fixture(scope="module")
def engine():
    with EngineProcess("--model", MODEL, "--max-model-len", "256", "--api-key", KEY) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine) -> Results:
    """The greedy answers over ZMQ: text, why it ended, tokens of the prompt and of the answer."""
    with Client(engine.address, timeout=100) as client:
        options = dict(max_tokens=LENGTH, temperature=0.0)
        answers = {"completion": client.complete(PROMPT, **options), "chat": client.complete(messages=MESSAGES, **options)}
    return {
        name: {
            "text": answer.text, "finish_reason": answer.finish_reason, "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
        }
        for name, answer in answers.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def results_of(engine) -> Callable[[str], Results]:
    """What a library's script prints; each runs once."""
    known: dict[str, Results] = {}
    # Nothing of ours and no settings of the user's; litellm would otherwise look for its list of prices on the network.
    environment = {"PATH": os.environ["PATH"], "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def run(library: str) -> Results:
        if library not in known:
            script = ROOT / "tests" / "client_scripts" / f"{library}_client.py"
            done = subprocess.run(
                [PYTHON, script, engine.url, KEY], env=environment, capture_output=True, text=True, timeout=250
            )
            assert done.returncode == 0, done.stderr
            known[library] = json.loads(done.stdout.splitlines()[-1])
        return known[library]

    return run


LIBRARIES = {"openai": "openai", "langchain": "langchain-openai", "litellm": "litellm"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_library_is_the_one_that_is_pinned_by_hash(library, results_of):
    lock = (ROOT / "tests" / "clients.txt").read_text()
    assert f"\n{LIBRARIES[library]}=={results_of(library)['version']} \\\n    --hash=sha256:" in lock
    assert "://" not in lock


WHOLE = [
    ("openai", "completion"), ("openai", "chat"), ("langchain", "completion"), ("langchain", "chat"), ("langchain", "chat_async"),
    ("litellm", "completion"), ("litellm", "chat"), ("litellm", "hosted_chat"), ("openai", "chat_stream_helper"),
]  # fmt: skip
STREAMED = [
    ("openai", "completion_stream"), ("openai", "chat_stream"), ("langchain", "chat_stream"), ("langchain", "chat_stream_async"),
    ("langchain", "completion_stream"), ("litellm", "completion_stream"), ("litellm", "chat_stream"), ("litellm", "hosted_chat_stream"),
]  # fmt: skip


@pytest.mark.parametrize(("library", "case"), WHOLE + STREAMED)
def test_an_answer_is_the_greedy_one_with_its_usage(library, case, results_of, expected):
    answer = dict(results_of(library)[case])
    parts = answer.pop("parts")
    assert answer == {name: value for name, value in expected["chat" if "chat" in case else "completion"].items() if name in answer}
    assert parts > 4 if (library, case) in STREAMED else parts == 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_many_at_once_get_the_same(library, results_of, expected):
    many = results_of(library)["many"]
    assert len(many) >= 6 and all(answer | {"parts": 0} == expected["chat"] | {"parts": 0} for answer in many)


def test_models_choices_stops_scores_and_extra_fields(results_of, expected):
    found = results_of("openai")
    assert found["models"] == [MODEL] and found["model"] == MODEL
    first, again = found["seeded"]
    assert first == again and len(set(first)) == 2
    assert found["stopped"]["text"] == expected["completion"]["text"].split(" 6")[0] and found["stopped"]["finish_reason"] == "stop"
    tokens, logprobs, num_others = zip(*found["scores"])
    assert "".join(tokens).startswith(expected["chat"]["text"]) and len(tokens) == expected["chat"]["completion_tokens"]
    assert max(logprobs) <= 0 and set(num_others) == {2}
    assert len(found["extra_ids"]) == LENGTH


# What is done wrong, the class among the raised error's that a program catches, the status, and words of the message.
ERRORS = [
    ("openai", "unknown_model", "NotFoundError", 404, "'other' does not exist"),
    ("openai", "bad_value", "BadRequestError", 400, "temperature must be between"),
    ("openai", "bad_value_in_a_stream", "BadRequestError", 400, "temperature must be between"),
    ("openai", "unknown_field", "BadRequestError", 400, "temperatur"),
    ("openai", "too_long", "BadRequestError", 400, "prompt is too long: it has \\d+ tokens"),
    ("openai", "far_too_long", "BadRequestError", 400, "prompt may have at most \\d+ characters"),
    ("openai", "too_long_chat", "BadRequestError", 400, "prompt is too long: it has \\d+ tokens"),
    ("openai", "wrong_key", "AuthenticationError", 401, "API key"),
    ("langchain", "unknown_model", "OpenAIModelNotFoundError", 404, "'other' does not exist"),
    ("langchain", "bad_value", "OpenAIInvalidRequestError", 400, "temperature must be between"),
    ("langchain", "bad_value_in_a_stream", "OpenAIInvalidRequestError", 400, "temperature must be between"),
    ("langchain", "too_long", "BadRequestError", 400, "prompt is too long: it has \\d+ tokens"),
    ("langchain", "too_long_chat", "ContextOverflowError", 400, "prompt is too long: it has \\d+ tokens"),
    ("langchain", "wrong_key", "OpenAIAuthenticationError", 401, "API key"),
    ("litellm", "unknown_model", "NotFoundError", 404, "'other' does not exist"),
    ("litellm", "bad_value", "BadRequestError", 400, "temperature must be between"),
    ("litellm", "bad_value_in_a_stream", "BadRequestError", 400, "temperature must be between"),
    ("litellm", "too_long", "ContextWindowExceededError", 400, "prompt is too long: it has \\d+ tokens"),
    ("litellm", "too_long_chat", "ContextWindowExceededError", 400, "prompt is too long: it has \\d+ tokens"),
    ("litellm", "wrong_key", "AuthenticationError", 401, "API key"),
    ("litellm", "hosted_wrong_key", "AuthenticationError", 401, "API key"),
]


@pytest.mark.parametrize(("library", "case", "kind", "status", "words"), ERRORS)
def test_an_error_is_the_librarys_own_for_it(library, case, kind, status, words, results_of):
    error = results_of(library)[case]
    assert error["class"] and kind in error["bases"], error
    assert error["status"] == status and re.search(words, error["message"]), error


def test_the_field_at_fault_is_named(results_of):
    found = results_of("openai")
    assert [found[case]["param"] for case in ("bad_value", "unknown_field", "far_too_long")] == ["temperature", "temperatur", "prompt"]
