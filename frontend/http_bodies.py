"""Bodies of the OpenAI-compatible routes, strictly typed, and what they ask of the engine. No sockets here."""

from typing import Any, Literal

import msgspec

from protocol.messages import ChatMessage, Generate
from protocol.sampling import SamplingParams

MAX_PROMPTS = 64
MAX_MESSAGES = 1024
# Known, and to come: refused by name, since ignoring them would give another answer than was asked for.
NOT_YET = (
    "tools", "tool_choice", "functions", "function_call", "response_format", "logprobs", "top_logprobs", "prompt_logprobs", "echo",
    "suffix", "best_of", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "modalities", "audio",
)  # fmt: skip


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries beside the text."""

    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # usage in every chunk


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class BodyMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both routes take; null means the default. The last ones have no effect here and are accepted, as clients send them."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


class CompletionBody(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions: a text, token ids, or several of either."""

    prompt: str | list[str | int | list[int]]  # of one kind only: checked later, since msgspec tells no lists apart


class ChatBody(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[BodyMessage]
    max_completion_tokens: int | None = None


# Of the same name and meaning in SamplingParams; the routes name the length in ways of their own.
SAME = [name for name in SamplingParams.__struct_fields__ if name in Body.__struct_fields__ and name != "max_tokens"]


def read_completion(data: bytes) -> CompletionBody:
    """Raises ValueError or msgspec's DecodeError naming the field, for a body that is not one."""
    return msgspec.convert(_fields(data), CompletionBody)


def read_chat(data: bytes) -> ChatBody:
    """Raises ValueError or msgspec's DecodeError naming the field, for a body that is not one."""
    return msgspec.convert(_fields(data), ChatBody)


def _fields(data: bytes) -> dict[str, object]:
    fields = msgspec.json.decode(data)
    if not isinstance(fields, dict):
        raise ValueError(f"the body must be a JSON object, got {type(fields).__name__}")
    for name in NOT_YET:
        if fields.get(name) not in (None, False):
            raise ValueError(f"{name} is not supported yet")
    return fields


def completion_requests(body: CompletionBody) -> list[Generate]:
    """One request for each prompt, in order. Raises ValueError for what the engine cannot be asked."""
    prompts = body.prompt
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"prompt takes 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
    params = _sampling(body, body.max_tokens)
    return [_request(body, params, **_prompt(prompt)) for prompt in prompts]


def _prompt(prompt: object) -> dict[str, object]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return {"prompt_ids": prompt}
    raise ValueError("prompt must be a text, a list of texts, a list of token ids or a list of such lists")


def chat_request(body: ChatBody) -> Generate:
    """The one request. Raises ValueError for what the engine cannot be asked."""
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        raise ValueError(f"messages takes 1 to {MAX_MESSAGES} messages, got {len(body.messages)}")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ValueError(f"max_tokens {body.max_tokens} and max_completion_tokens {body.max_completion_tokens} differ: give one")
    messages = [ChatMessage(message.role, _text(message.content)) for message in body.messages]
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    return _request(body, _sampling(body, most), messages=messages)


def _text(content: str | list[TextPart] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _sampling(body: Body, max_tokens: int | None) -> SamplingParams:
    given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    return SamplingParams(max_tokens=max_tokens, **given)


def _request(body: Body, params: SamplingParams, **prompt: object) -> Generate:
    if body.stream_options is not None and not body.stream:
        raise ValueError("stream_options is for streams only")
    return Generate(0, sampling=params, cache_salt=body.cache_salt, priority=body.priority or 0, **prompt)
