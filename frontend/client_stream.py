"""What the blocking and the asyncio client share: building requests, checking replies, and the result of a whole request."""

import msgspec

from protocol.address import MAX_DOOR_BYTES
from protocol.logprobs import TokenLogprob
from protocol.messages import ChatMessage, ClientMessage, Error, FinishReason, Generate, Output, Usage, encode
from protocol.sampling import SamplingParams

Messages = list[dict[str, str]] | list[ChatMessage]


class EngineError(Exception):
    """The engine's refusal, or its absence. `code` is as an HTTP status; 504 stands for no answer in time."""

    def __init__(self, code: int, message: str):
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


class Choice(msgspec.Struct, frozen=True):
    """One of a request's n answers."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None  # of token_ids, where asked for
    prompt_logprobs: list[TokenLogprob | None] | None  # of the first choice only


class Completion(Choice, frozen=True):
    """The whole answer to one request: the first choice's fields, and all choices, whose tokens the usage counts."""

    usage: Usage
    choices: list[Choice]


def is_last(reply: Output | Error) -> bool:
    """Whether a request's replies end with this one."""
    return isinstance(reply, Error) or reply.usage is not None


def check_one_turn(sampling: dict[str, object]) -> None:
    """Raise ValueError where choices would be mixed into one text."""
    if sampling.get("n") not in (None, 1):
        raise ValueError(f"chat gives one turn, so n must be 1, got {sampling['n']}; generate and complete give several")


class ReplyCheck:
    """Passes on the outputs of one request; raises EngineError for an error, and for a gap or a repeat in their numbers."""

    def __init__(self) -> None:
        self.next_seq = 0

    def check(self, reply: Output | Error) -> Output:
        """The reply, if it is the output that is due."""
        if isinstance(reply, Error):
            raise EngineError(reply.code, reply.message)
        if reply.seq != self.next_seq:
            raise EngineError(500, f"output {self.next_seq} of request {reply.request_id} was due, {reply.seq} came")
        self.next_seq += 1
        return reply


def build_request(
    request_id: int,
    prompt: str | None,
    prompt_ids: list[int] | None,
    messages: Messages | None,
    stream: bool,
    cache_salt: str | None,
    priority: int,
    sampling: dict[str, object],
) -> Generate:
    """A request. Raises ValueError for a parameter that SamplingParams does not know, or a wrong type."""
    turns = None if messages is None else msgspec.convert(messages, list[ChatMessage], from_attributes=True)
    params = msgspec.convert(sampling, SamplingParams)
    return Generate(request_id, prompt, prompt_ids, turns, params, stream, cache_salt, priority)


def encode_request(message: ClientMessage) -> bytes:
    """The payload. Raises ValueError when the door would disconnect its sender for its length."""
    payload = encode(message)
    if len(payload) > MAX_DOOR_BYTES:
        raise ValueError(f"a request may have at most {MAX_DOOR_BYTES} bytes, this one has {len(payload)}")
    return payload


def join_outputs(outputs: list[Output]) -> Completion:
    """The outputs of one request, the last one included, as one result."""
    by_choice: dict[int, list[Output]] = {}
    for output in outputs:
        by_choice.setdefault(output.index, []).append(output)
    choices = [_join_choice(by_choice[index]) for index in sorted(by_choice)]
    return Completion(*msgspec.structs.astuple(choices[0]), outputs[-1].usage, choices)


def _join_choice(outputs: list[Output]) -> Choice:
    last = outputs[-1]
    return Choice(
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        finish_reason=last.finish_reason,
        logprobs=None if last.logprobs is None else [score for output in outputs for score in output.logprobs],
        prompt_logprobs=next((output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None),
    )
