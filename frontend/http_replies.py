"""What the OpenAI-compatible routes answer, as JSON. No sockets here."""

import re
import time

import msgspec

from frontend.http_bodies import Body, CompletionBody, scores_only
from frontend.http_logprobs import ChoiceLogprobs
from frontend.request import Delta
from frontend.scores import PackedScores
from frontend.tokenizer import ModelTokenizer
from protocol.messages import Usage

ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 413: "invalid_request_error", 431: "invalid_request_error", 503: "service_unavailable_error",
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


class Prompt(msgspec.Struct, frozen=True):
    """One of a request's prompts, as its answer may repeat it."""

    token_ids: list[int]
    text: str


class Replies:
    """The shape of one request's answers, whole or in parts: all have the same id, time and model.

    Choice i belongs to prompt i // n. Only a prompt's first choice has its scores, so the parts of the others that need them are held
    until they have come.
    """

    def __init__(self, body: Body, prompts: list[Prompt], request_id: str, model: str, tokenizer: ModelTokenizer | None):
        self.body, self.prompts, self.model, self.tokenizer = body, prompts, model, tokenizer
        self.is_chat = not isinstance(body, CompletionBody)
        self.echoes = not self.is_chat and bool(body.echo)
        self.drops_output = scores_only(body)
        self.has_scores = body.logprobs is not None and body.logprobs is not False  # 0 asks for the tokens' own
        self.skips_special = body.skip_special_tokens is not False
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + request_id
        self.created = int(time.time())
        self.prompt_scores: dict[int, PackedScores] = {}  # by prompt
        self.begun: dict[int, ChoiceLogprobs] = {}  # by choice, from its first part on
        self.held: dict[int, list[Delta]] = {}

    def whole(self, choices: list[Delta], usages: list[Usage]) -> dict[str, object]:
        """The answer to a request that is not streamed."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        shaped = [choice for index, delta in enumerate(choices) for choice in self._choices(index, delta)]
        extras = self._prompt_extras(0) if self.is_chat else {}
        return self._envelope(kind, shaped) | {"usage": usage_body(self.usage(usages))} | extras

    def chunks(self, index: int, delta: Delta) -> list[dict[str, object]]:
        """A part of a streamed answer; a chat's first one names the role."""
        chunks = []
        for choice in self._choices(index, delta):
            if self.is_chat:
                choice["delta"] = choice.pop("message")
            chunks.append(self._envelope(self._chunk_kind, [choice]))
        return chunks

    def usage_chunk(self, usages: list[Usage]) -> dict[str, object]:
        """The last chunk, where it was asked for."""
        return self._envelope(self._chunk_kind, []) | {"usage": usage_body(self.usage(usages))}

    def usage(self, usages: list[Usage]) -> Usage:
        """That of several prompts together."""
        fields = ("prompt_tokens", "completion_tokens", "cached_tokens")
        total = Usage(*(sum(getattr(usage, field) for usage in usages) for field in fields))
        return msgspec.structs.replace(total, completion_tokens=0) if self.drops_output else total

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _choices(self, index: int, delta: Delta) -> list[dict[str, object]]:
        """The part, after those of the choice that were held; with a prompt's scores, also what waited for them."""
        number = index // (self.body.n or 1)
        if delta.prompt_scores is not None:
            self.prompt_scores[number] = delta.prompt_scores
        if self.echoes and self.has_scores and number not in self.prompt_scores:
            self.held.setdefault(index, []).append(delta)
            return []
        ready = [other for other in self.held if other // (self.body.n or 1) == number and other != index]
        waited = [(other, part) for other in [index, *ready] for part in self.held.pop(other, [])]
        return [self._choice(other, number, part) for other, part in [*waited, (index, delta)]]

    def _choice(self, index: int, number: int, delta: Delta) -> dict[str, object]:
        is_first = index not in self.begun
        logprobs = self.begun.setdefault(index, ChoiceLogprobs(self.tokenizer, self.skips_special))
        if self.drops_output:
            delta = msgspec.structs.replace(delta, text="", token_ids=[], finish_reason=delta.finish_reason and "length")
        choice: dict[str, object] = {"index": index}
        if self.is_chat:
            choice["message"] = ({"role": "assistant"} if is_first else {}) | {"content": delta.text}
        else:
            choice["text"] = self.prompts[number].text + delta.text if self.echoes and is_first else delta.text
        choice["logprobs"] = self._logprobs(number, delta, logprobs, is_first) if self.has_scores else None
        choice["finish_reason"] = delta.finish_reason
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice if self.is_chat or not is_first else choice | self._prompt_extras(number)

    def _logprobs(self, number: int, delta: Delta, logprobs: ChoiceLogprobs, is_first: bool) -> dict[str, object]:
        scores = [] if self.drops_output else delta.scores.read()
        if self.is_chat:
            return logprobs.chat(scores)
        scored = [(score.token_id, score) for score in scores]
        if self.echoes and is_first:
            scored = [*zip(self.prompts[number].token_ids, self.prompt_scores[number].read_prompt(), strict=True), *scored]
        return logprobs.completion(scored, self.body.logprobs)

    def _prompt_extras(self, number: int) -> dict[str, object]:
        """What vLLM tells about the prompt: in a completion's choice, and beside a chat's."""
        extras = {}
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = self.prompts[number].token_ids
        if self.body.prompt_logprobs is not None and number in self.prompt_scores:
            scores = self.prompt_scores[number].read_prompt()
            extras["prompt_logprobs"] = ChoiceLogprobs(self.tokenizer, False).prompt(scores, self.body.prompt_logprobs)
        return extras

    def _envelope(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
