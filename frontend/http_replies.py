"""What the OpenAI-compatible routes answer, as JSON. No sockets here."""

import re
import time

import msgspec

from frontend.request import Delta
from protocol.messages import Usage

ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    413: "invalid_request_error", 503: "service_unavailable_error",
}  # fmt: skip
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def error_body(code: int, message: str) -> dict[str, object]:
    """An error in OpenAI's shape; `param` is the field that a message begins with."""
    found = re.match(r"[a-z][a-z_]*(?= (?:must|may|takes|is|has|and) )|.*field `\$?\.?(\w+)", message)
    param = (found[1] or found[0]) if found and code == 400 else None
    return {"error": {"message": message, "type": ERROR_TYPES.get(code, "server_error"), "param": param, "code": code}}


def event(content: dict[str, object]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def usage_body(usage: Usage) -> dict[str, object]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def total_usage(usages: list[Usage]) -> Usage:
    """The usage of several prompts together."""
    return Usage(*(sum(getattr(usage, field) for usage in usages) for field in ("prompt_tokens", "completion_tokens", "cached_tokens")))


class Replies:
    """The shape of one route's answers: all have the same id, time and model."""

    def __init__(self, is_chat: bool, request_id: str, model: str, with_token_ids: bool):
        self.is_chat, self.with_token_ids = is_chat, with_token_ids
        self.id, self.model, self.created = f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}", model, int(time.time())
        self.has_role: set[int] = set()

    def whole(self, choices: list[Delta], usage: Usage) -> dict[str, object]:
        """The answer to a request that is not streamed."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._envelope(kind, [self._choice(i, delta) for i, delta in enumerate(choices)]) | {"usage": usage_body(usage)}

    def chunk(self, index: int, delta: Delta) -> dict[str, object]:
        """A part of a streamed answer; a chat's first one names the role."""
        choice = self._choice(index, delta)
        if self.is_chat:
            role = {} if index in self.has_role else {"role": "assistant"}
            self.has_role.add(index)
            del choice["message"]
            choice["delta"] = role | {"content": delta.text}
        return self._envelope(self._chunk_kind, [choice])

    def usage_chunk(self, usage: Usage) -> dict[str, object]:
        """The last chunk, where it was asked for."""
        return self._envelope(self._chunk_kind, []) | {"usage": usage_body(usage)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _choice(self, index: int, delta: Delta) -> dict[str, object]:
        text = {"message": {"role": "assistant", "content": delta.text}} if self.is_chat else {"text": delta.text}
        ids = {"token_ids": delta.token_ids} if self.with_token_ids else {}
        return {"index": index, **text, "logprobs": None, "finish_reason": delta.finish_reason, **ids}

    def _envelope(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
