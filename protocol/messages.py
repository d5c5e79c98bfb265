"""Every message between two processes, and one typed decoder per channel.

Token ids and block ids travel as little-endian int32 bytes (`pack`, `unpack`): one copy instead of one object per id.
"""

from typing import Annotated, Literal

import msgspec
import numpy as np

from protocol.controls import RowControls
from protocol.logprobs import TokenLogprob
from protocol.sampling import Int64, RowSampling, SamplingParams

PROTOCOL_VERSION = 1

# A worker's token for a row whose logits held no finite value; its request ends with reason "error".
NO_TOKEN = -1

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
Priority = Annotated[int, msgspec.Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]

FinishReason = Literal["stop", "length", "abort", "error"]


def pack(ids) -> bytes:
    """Token or block ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack(data: bytes) -> np.ndarray:
    """The ids of `pack`, as a read-only int32 array."""
    return np.frombuffer(data, dtype="<i4")


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Between our own processes: positional, so a name costs no bytes."""


# ---- scheduler -> worker ------------------------------------------------------------------------------------------


class WorkerBegin(Message, frozen=True):
    """The scheduler's answer to WorkerHello. After the worker's WorkerReady comes step 0 of this epoch."""

    epoch: int
    tokenizer_size: int  # ids from here up are never sampled; 0: there is no tokenizer


class RowJoin(Message, frozen=True):
    """A row given to a request: everything the last owner left is replaced."""

    row: int
    generation: int
    prompt_len: int  # of the request's own prompt, also after a preemption
    num_computed: int  # tokens whose KV is already in `blocks`
    blocks: bytes
    sampling: RowSampling
    controls: RowControls | None = None  # with the known tokens, where they are needed; None: it has none
    is_scored: bool = False  # its samples' log-probabilities are wanted


class BlockGrants(Message, frozen=True):
    """Blocks for block tables: blocks[i] goes to place places[i] of row rows[i] (packed, like all ids)."""

    rows: bytes = b""
    places: bytes = b""
    blocks: bytes = b""


class Chunk(Message, frozen=True):
    """Known tokens to run through a row this step, right after those it has computed."""

    row: int
    tokens: bytes
    samples: bool  # the last chunk of what is known: a token is sampled after it
    targets: bytes = b""  # tokens to score: the i-th at the place after the chunk's i-th


class Swap(Message, frozen=True):
    """Blocks to copy between the KV pool and host memory: blocks[i] to or from places[i] (packed)."""

    is_out: bool  # to host memory
    blocks: bytes
    places: bytes


class StepDelta(Message, frozen=True):
    """What changed since step - 1. Applied in order, never skipped; all lists empty means "the same rows again".

    The step runs one token for each decoding row, in ascending row order, then the chunks in the order given. It samples for
    every decoding row and every chunk that says so, in that order.
    """

    step: int
    joins: list[RowJoin] = []
    grants: BlockGrants | None = None
    decode_on: list[int] = []  # rows that decode from this step on
    decode_off: list[int] = []  # rows that no longer decode
    chunks: list[Chunk] = []
    swaps: list[Swap] = []  # carried out one after the other, before the step


# ---- worker -> scheduler ------------------------------------------------------------------------------------------


class WorkerHello(Message, frozen=True):
    """A worker is there; answered by WorkerBegin once a frontend is."""

    version: int
    epoch: int
    rank: int


class WorkerReady(Message, frozen=True):
    """A worker has its weights, its KV pool and its graphs."""

    num_blocks: int
    block_size: int
    num_rows: int
    vocab_size: int
    max_model_len: int  # the model's own limit, or the configured one where smaller
    num_host_blocks: int = 0  # places for the blocks of preempted requests
    block_copy_s: float = 0.0  # measured: one block to one of them, or back


class StepResult(Message, frozen=True):
    """The sampled tokens of a step, in the order that StepDelta defines."""

    step: int
    tokens: bytes
    scores: bytes = b""  # of those samples that want them, then of the chunks' targets; see `protocol.logprobs`


# ---- frontend -> scheduler ----------------------------------------------------------------------------------------


class FrontendHello(Message, frozen=True):
    """A frontend asks for admission; answered by SchedulerReady once the workers are ready."""

    version: int
    epoch: int
    tokenizer_size: int  # number of ids that the tokenizer knows; 0: there is no tokenizer


class AddRequest(Message, frozen=True):
    """A checked request. `generated` holds tokens delivered before, when a frontend resubmits after a fault."""

    handle: int  # chosen by the frontend, unique within it
    prompt: bytes
    generated: bytes
    max_tokens: int  # counts generated ones too
    end_ids: list[int]  # end-of-sequence ids (unless ignored) and the request's own stop ids
    sampling: RowSampling
    salt: bytes = b""  # only requests of the same salt share prefix blocks
    priority: Priority = 0  # lower ones first
    more_seeds: list[Int64] = []  # of further choices of the same prompt; their handles are handle + 1, handle + 2, …
    controls: RowControls | None = None  # without tokens
    is_scored: bool = False  # the log-probabilities of its tokens are wanted
    is_prompt_scored: bool = False  # and those of its prompt, of the first choice only
    is_stepwise: bool = False  # no step of it is planned before the last one's token is here: what may come next hangs on it


class AbortRequests(Message, frozen=True):
    """Requests nobody waits for any more. Unknown and repeated handles are harmless."""

    handles: list[int]


class GetStats(Message, frozen=True):
    """Asks for one Snapshot."""


class FrontendReport(Message, frozen=True):
    """What a frontend has counted since its start, for the metrics page of another one."""

    histograms: dict[str, tuple[list[int], float]]  # counts by bucket, and the sum of the values
    finished: dict[str, int]  # choices, by reason
    rejected: dict[str, int]  # requests, by reason
    num_prompt_tokens: int
    num_generated_tokens: int
    num_malformed: int
    num_slow_readers: int


# ---- scheduler -> frontend ----------------------------------------------------------------------------------------


class SchedulerReady(Message, frozen=True):
    """The limits that the doors check against."""

    version: int
    epoch: int
    max_model_len: int
    vocab_size: int


class Finished(Message, frozen=True):
    """A request's last word, sent with or after its last token."""

    handle: int
    reason: FinishReason
    num_preemptions: int = 0


class Started(Message, frozen=True):
    """A request has left the queue for the first time; comes before its first token or with it."""

    handle: int
    num_cached: int  # prompt tokens whose KV was found in the prefix cache
    waited_s: float = 0.0  # in the queue


class Scores(Message, frozen=True):
    """Scores of a request: of its token in the same message, or of the next prompt tokens, in order from the second one on."""

    handle: int
    is_prompt: bool
    data: bytes  # see `protocol.logprobs`


class TokenBatch(Message, frozen=True):
    """The new tokens of one step for one frontend: tokens[i] belongs to handles[i] (int64 bytes)."""

    handles: bytes
    tokens: bytes
    finished: list[Finished]
    started: list[Started] = []
    scores: list[Scores] = []


class Refused(Message, frozen=True):
    """A request that was not admitted, with the reason for its client."""

    handle: int
    code: int  # as an HTTP status: 400 or 503
    message: str


class Stats(Message, frozen=True):
    """A snapshot of the scheduler."""

    num_running: int
    num_waiting: int
    free_blocks: int  # that may be given out: unused ones and idle ones
    idle_blocks: int  # held by nobody, kept for their content
    total_blocks: int
    free_rows: int
    total_rows: int
    num_tracked: int  # requests in any table of the scheduler
    num_preemptions: int
    num_steps: int  # forward passes: a step without work is never sent
    num_generated_tokens: int
    num_prompt_tokens: int  # of admissions, also after preemptions
    num_cached_tokens: int  # of these, found in the prefix cache
    num_malformed: int
    num_waiting_tokens: int = 0  # known tokens of waiting requests, of a prompt with several choices once
    num_refused_invalid: int = 0
    num_refused_queue_requests: int = 0
    num_refused_queue_tokens: int = 0
    num_queue_timeouts: int = 0  # refused after having waited
    num_blocks_out: int = 0  # copied to host memory
    num_blocks_in: int = 0  # and back
    free_host_blocks: int = 0
    total_host_blocks: int = 0
    step_gap_us: int = 0  # time in all when requests ran and no step was in flight
    step_age_us: int = 0  # time since the oldest step in flight was sent, or since the last result


class Snapshot(Message, frozen=True):
    """The answer to GetStats."""

    stats: Stats
    step_tokens: list[int]  # steps by the number of their tokens, in buckets of `protocol.metrics`
    num_step_tokens: int
    reports: list[FrontendReport]  # the other frontends' last ones


# ---- client <-> frontend: by name, so that an error can name the field --------------------------------------------


class ClientMessage(msgspec.Struct, frozen=True, tag=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    """Between a client and the ZMQ door: a map with a "type", so that other languages need no schema."""


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: str
    content: str
    name: str | None = None  # of who speaks, for templates that show it


class Generate(ClientMessage, frozen=True):
    """Exactly one of prompt (text), prompt_ids and messages is given."""

    request_id: int  # unique among the client's requests in flight
    prompt: str | None = None
    prompt_ids: list[int] | None = None
    messages: list[ChatMessage] | None = None
    sampling: SamplingParams = SamplingParams()
    stream: bool = True
    cache_salt: str | None = None  # the prefix cache is shared among requests of the same salt only
    priority: int = 0  # lower ones first, with --scheduling-policy priority
    add_special_tokens: bool = True  # to a text: what the model wants before every one, unless the text spells it


class Cancel(ClientMessage, frozen=True):
    """The client no longer wants a request. Harmless when it is unknown."""

    request_id: int


class GetInfo(ClientMessage, frozen=True):
    """Asks for one Info."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache


class Output(ClientMessage, frozen=True):
    """New text and tokens of one choice of a request; with `finish_reason` set, the choice's last message.

    The request's last message is the one with `usage`: the prompt once, and the tokens of all choices. `text` may lag behind
    `token_ids` while a character or a possible stop string is incomplete.
    """

    request_id: int
    seq: int  # 0, 1, 2, … over all choices: a gap or a repeat is a fault
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0  # of the choice, below the request's n
    logprobs: list[TokenLogprob] | None = None  # of token_ids, where asked for
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first tokens; nothing precedes the first prompt token


class Error(ClientMessage, frozen=True):
    """A request's only or last message. `request_id` is None when the frame that caused it could not be read."""

    request_id: int | None
    code: int  # as an HTTP status
    message: str


class KeepAlive(ClientMessage, frozen=True):
    """Sent so that a vanished client is noticed; a client ignores it."""


class Info(ClientMessage, frozen=True):
    """What is served, and how it is doing."""

    model: str
    max_model_len: int
    vocab_size: int
    stats: dict[str, int]


encode = msgspec.msgpack.Encoder().encode

decode_to_worker = msgspec.msgpack.Decoder(WorkerBegin | StepDelta).decode
decode_from_worker = msgspec.msgpack.Decoder(WorkerHello | WorkerReady).decode
decode_result = msgspec.msgpack.Decoder(StepResult).decode
decode_from_frontend = msgspec.msgpack.Decoder(FrontendHello | AddRequest | AbortRequests | GetStats | FrontendReport).decode
decode_to_frontend = msgspec.msgpack.Decoder(SchedulerReady | TokenBatch | Refused | Snapshot).decode
decode_from_client = msgspec.msgpack.Decoder(Generate | Cancel | GetInfo).decode
decode_to_client = msgspec.msgpack.Decoder(Output | Error | KeepAlive | Info).decode
