"""Bodies of the OpenAI-compatible routes, strictly typed, and what they ask of the engine. No sockets here."""

import re
from typing import Any, Literal, TypeVar

import msgspec

from protocol.messages import ChatMessage, Generate
from protocol.sampling import SamplingParams, check_bounds

MAX_PROMPTS = 64
MAX_MESSAGES = 1024
NEAR_BYTES = 40
# Of what a body may hold: reading it stops all streams meanwhile, 2 s for 8 MiB of lists of one id, a tenth of one within these limits.
MAX_TEXTS, MAX_LISTS, MAX_VALUES = 2**16, 2**14, 2**20
MANY = 2**16  # separators, below which nothing needs to be counted
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# Known, and not here yet: refused by name, since ignoring them would give another answer than was asked for. The values beside them ask
# for nothing, and neither does null.
NOT_YET: dict[str, tuple[object, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "structured_outputs": (), "suffix": ("",), "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1.0,),
    "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (), "prompt_embeds": (), "chat_template": (),
    "chat_template_kwargs": ({},), "documents": ([],), "add_generation_prompt": (True,), "continue_final_message": (False,),
}  # fmt: skip

Kind = TypeVar("Kind", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries beside the text."""

    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # usage in every chunk
    include_obfuscation: bool | None = None  # without effect: nothing is padded


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class BodyMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation. Clients send an answer back as they got it: its empty fields are accepted."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: list[None] | None = None


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
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


class CompletionBody(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions: a text, token ids, or several of either."""

    prompt: str | list[str | int | list[int]]  # of one kind only: checked later, since msgspec tells no lists apart
    logprobs: int | None = None  # of each token, beside those of so many best ones
    echo: bool | None = None  # the prompt before the answer, with its scores where there are any


class ChatBody(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[BodyMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[BodyMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


# Of the same name and meaning in SamplingParams; the routes name the length and the scores in ways of their own.
OWN_WAY = ("max_tokens", "logprobs", "prompt_logprobs")
SAME = [name for name in SamplingParams.__struct_fields__ if name in Body.__struct_fields__ and name not in OWN_WAY]


def read_body(data: bytes, kind: type[Kind], ignores_unknown: bool = False) -> Kind:
    """Raises ValueError or msgspec's DecodeError naming the field, for a body that is not one."""
    fields = _decode(data)
    if not isinstance(fields, dict):
        raise ValueError(f"the body must be a JSON object, got {type(fields).__name__}")
    for name, harmless in NOT_YET.items():
        value = fields.pop(name, None)
        if value is not None and value not in harmless:
            raise ValueError(f"{name} is not supported yet")
    if ignores_unknown:
        fields = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    return msgspec.convert(fields, kind)


def _decode(data: bytes) -> object:
    """JSON; where it is none, the error shows the place, since NaN and its like have no field yet."""
    _check_amount(data)
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        found = re.search(r"\(byte (\d+)\)$", str(error))
        near = data[max(0, int(found[1]) - NEAR_BYTES) : int(found[1]) + NEAR_BYTES] if found else data[-NEAR_BYTES:]
        raise ValueError(f"{error}, near {near.decode(errors='replace')!r}") from None


def _check_amount(data: bytes) -> None:
    """Raise ValueError for a body of too many parts, counted without reading it. Separators within texts do not count."""
    counts = {"texts": ((data.count(b'"') - data.count(b'\\"')) // 2, MAX_TEXTS)}
    if counts["texts"][0] <= MAX_TEXTS and sum(map(data.count, (b",", b"[", b"{"))) > MANY:
        bare = STRING.sub(b"", data)
        counts["lists and objects"] = (bare.count(b"[") + bare.count(b"{"), MAX_LISTS)
        counts["values"] = (bare.count(b","), MAX_VALUES)
    for what, (count, most) in counts.items():
        if count > most:
            raise ValueError(f"the body may hold at most {most} {what}, got {count}")


def completion_requests(body: CompletionBody) -> list[Generate]:
    """One request for each prompt, in order. Raises ValueError for what the engine cannot be asked."""
    prompts = body.prompt
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"prompt takes 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
    scored = [num for num in (body.prompt_logprobs, body.logprobs if body.echo else None) if num is not None]
    max_tokens = 1 if scores_only(body) else body.max_tokens
    params = _sampling(body, max_tokens, body.logprobs, max(scored, default=None))
    return [_request(body, params, **_prompt(prompt)) for prompt in prompts]


def scores_only(body: Body) -> bool:
    """Whether the prompt is to be run and nothing generated: one token is, since a prompt cannot be run without, and is dropped."""
    return isinstance(body, CompletionBody) and bool(body.echo) and body.max_tokens == 0


def _prompt(prompt: object) -> dict[str, object]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return {"prompt_ids": prompt}
    raise ValueError("prompt must be a text, a list of texts, a list of token ids or a list of such lists")


def chat_request(body: ChatBody) -> Generate:
    """The one request. Raises ValueError for what the engine cannot be asked."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ValueError(f"max_tokens {body.max_tokens} and max_completion_tokens {body.max_completion_tokens} differ: give one")
    if body.top_logprobs is not None and not body.logprobs:
        raise ValueError(f"top_logprobs must be left out unless logprobs is true, got {body.top_logprobs}")
    check_bounds("max_tokens", body.max_completion_tokens, "max_completion_tokens")
    check_bounds("logprobs", body.top_logprobs, "top_logprobs")
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    params = _sampling(body, most, (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs)
    return _request(body, params, messages=chat_messages(body.messages))


def chat_messages(messages: list[BodyMessage]) -> list[ChatMessage]:
    """A conversation's turns, their parts joined. Raises ValueError when there are none or too many."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise ValueError(f"messages takes 1 to {MAX_MESSAGES} messages, got {len(messages)}")
    return [ChatMessage(message.role, _text(message.content), message.name) for message in messages]


def _text(content: str | list[TextPart] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _sampling(body: Body, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
    given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


def _request(body: Body, params: SamplingParams, **prompt: object) -> Generate:
    if body.stream_options is not None and not body.stream:
        raise ValueError("stream_options is for streams only")
    if body.stream and body.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs must be left out of streams")
    return Generate(
        0,
        sampling=params,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        add_special_tokens=body.add_special_tokens is not False,
        **prompt,
    )
