"""From a frontend's message to requests: what they must keep to, why they are refused, and their choices."""

from dataclasses import dataclass

import msgspec
import numpy as np

from protocol.config import PreemptionMode
from protocol.messages import AddRequest
from protocol.sampling import MAX_END_IDS
from scheduler.controls import controls_fault
from scheduler.table import Request
from scheduler.waiting import WaitingQueue


@dataclass(frozen=True)
class Limits:
    """What the workers' capacities and the configuration allow."""

    num_rows: int
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_step_tokens: int
    max_pipeline_depth: int
    max_queued_requests: int
    enable_prefix_caching: bool = True
    max_queued_tokens: int = 2**22
    queue_timeout_s: float | None = None  # None: a request waits as long as it takes
    num_host_blocks: int = 0  # that preempted requests may be saved in
    block_copy_s: float = 0.0  # seconds to copy one of them in one direction
    preemption_mode: PreemptionMode = "auto"


@dataclass
class Refusals:
    """Requests refused so far, by reason."""

    invalid: int = 0
    queue_requests: int = 0
    queue_tokens: int = 0
    queue_timeout: int = 0


def queue_fault(waiting: WaitingQueue, num_new: int, num_tokens: int, limits: Limits, refusals: Refusals) -> str | None:
    """Which limit of the queue a request would exceed; counted. An empty queue takes any, so that none is refused for ever."""
    if not waiting:
        return None
    if len(waiting) + num_new > limits.max_queued_requests:
        refusals.queue_requests += 1
        return f"{len(waiting)} requests wait"
    if waiting.num_tokens + num_tokens > limits.max_queued_tokens:
        refusals.queue_tokens += 1
        return f"{waiting.num_tokens} prompt tokens wait, {num_tokens} more would exceed {limits.max_queued_tokens}"
    return None


def fault_of(message: AddRequest, tokens: np.ndarray, limits: Limits) -> str | None:
    """What is wrong with a request. The doors have checked all this; a scheduler that trusts them dies with them."""
    if len(message.prompt) == 0:
        return "the prompt is empty"
    if len(tokens) >= limits.max_model_len:
        return f"the prompt has {len(tokens)} tokens; the context length {limits.max_model_len} leaves no room for a new one"
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        return f"token ids must be between 0 and {limits.vocab_size - 1}"
    if message.max_tokens <= len(message.generated) // 4:
        return f"max_tokens must exceed the {len(message.generated) // 4} tokens generated already, got {message.max_tokens}"
    if len(message.end_ids) > MAX_END_IDS:
        return f"at most {MAX_END_IDS} end ids are supported, got {len(message.end_ids)}"
    if message.more_seeds and message.generated:
        return "tokens generated already belong to one choice; several cannot continue them"
    return controls_fault(message.controls, limits.vocab_size)


def choices_of(
    frontend: int, message: AddRequest, tokens: np.ndarray, limits: Limits, first_arrival: int, now: float
) -> list[Request]:
    """The choices of a checked request, each with its own seed. All but the first have a prefix that the first computes for them."""
    prompt_len = len(message.prompt) // 4
    full_blocks = (prompt_len - 1) // limits.block_size if limits.enable_prefix_caching else 0
    return [
        Request(
            frontend=frontend,
            handle=message.handle + index,
            arrival=first_arrival + index,
            prompt_len=prompt_len,
            tokens=tokens,
            limit=min(prompt_len + message.max_tokens, limits.max_model_len),
            end_ids=np.asarray(message.end_ids, dtype=np.int32),
            sampling=msgspec.structs.replace(message.sampling, seed=seed),
            queued_at=now,
            priority=message.priority,
            num_shared=full_blocks * limits.block_size if index else 0,
            salt=message.salt,
            controls=message.controls,
            is_scored=message.is_scored,
            is_prompt_scored=message.is_prompt_scored and index == 0,
            is_stepwise=message.is_stepwise,
        )
        for index, seed in enumerate([message.sampling.seed, *message.more_seeds])
    ]
