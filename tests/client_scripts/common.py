"""What the scripts of the client libraries share. They run in .venv-clients, where the engine's packages are not."""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version

MODEL = "smollm2-135m"
PROMPT = "1, 2, 3, 4,"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
LENGTH = 16  # tokens of an answer
TOO_LONG = "one two three four " * 200  # tokens, beyond the engine's --max-model-len 256


def arguments() -> tuple[str, str]:
    """The engine's base URL and its key."""
    url, key = sys.argv[1:]
    return url, key


def outcome(text: str, finish_reason: str | None, prompt_tokens: int, completion_tokens: int, parts: int = 1) -> dict[str, object]:
    """An answer in the same shape for all libraries; parts: how many pieces of text it came in."""
    return {
        "text": text, "finish_reason": finish_reason, "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
        "parts": parts,
    }  # fmt: skip


def failure(ask: Callable[[], object]) -> dict[str, object]:
    """What the library raises when asked so: its class, its bases, the status and what it says."""
    try:
        answer = ask()
    except Exception as error:
        return {
            "class": type(error).__name__, "bases": [base.__name__ for base in type(error).__mro__],
            "status": getattr(error, "status_code", None), "message": str(error), "param": getattr(error, "param", None),
        }  # fmt: skip
    return {"class": None, "answer": repr(answer)}


def report(library: str, results: dict[str, object]) -> None:
    """Print the results as the last line."""
    print(json.dumps({"version": version(library), **results}))
