"""What a door checks before a request reaches the scheduler. Every refusal is a ValueError whose text is meant for the client."""

import asyncio
import random
import secrets
from concurrent.futures import ThreadPoolExecutor

import msgspec

from frontend.controls import resolve_controls
from frontend.sampling_defaults import SamplingDefaults
from frontend.tokenizer import ModelTokenizer
from protocol.controls import RowControls
from protocol.messages import MAX_PRIORITY, MIN_PRIORITY, ChatMessage, Generate
from protocol.sampling import RowSampling, SamplingParams, check_sampling, choice_seed, row_sampling

# No model's ids stand for more characters on average, save in runs of blanks; longer texts are refused before they cost time.
MAX_CHARS_PER_TOKEN = 64
MAX_SALT_BYTES = 256
TOO_LONG = "the prompt is too long"  # the words by which LangChain and LiteLLM know it from other refusals, to cut the prompt


class Limits(msgspec.Struct, frozen=True):
    """The scheduler's, from SchedulerReady."""

    max_model_len: int
    vocab_size: int


class Admitted(msgspec.Struct, frozen=True):
    """A checked request, with everything resolved that a client may leave open."""

    prompt_ids: list[int]
    max_tokens: int
    end_ids: frozenset[int]
    stops: list[str]
    sampling: RowSampling
    salt: bytes = b""  # of the prefix cache
    priority: int = 0
    more_seeds: list[int] = []  # of the choices after the first
    controls: RowControls | None = None
    num_logprobs: int | None = None  # None: no scores
    num_prompt_logprobs: int | None = None
    skips_special: bool = True
    shows_stop: bool = False


class Admission:
    """Checks and resolves requests. Text is rendered and tokenised in `threads`, so that streams go on meanwhile."""

    def __init__(
        self,
        tokenizer: ModelTokenizer | None,
        model_end_ids: frozenset[int],
        limits: Limits,
        threads: ThreadPoolExecutor,
        seed: int | None,
        takes_priority: bool = False,
        defaults: SamplingDefaults = SamplingDefaults(),
    ):
        self.tokenizer = tokenizer
        self.model_end_ids = model_end_ids
        self.limits = limits
        self.threads = threads
        self.takes_priority = takes_priority
        self.defaults = defaults
        self.random = secrets.SystemRandom() if seed is None else random.Random(seed)

    def needs_text(self, request: Generate) -> bool:
        """Whether `prompt_ids_of_text` must run before `admit`. Raises ValueError unless there is exactly one prompt."""
        given = [name for name in ("prompt", "prompt_ids", "messages") if getattr(request, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of prompt, prompt_ids and messages, got {' and '.join(given) or 'none'}")
        if request.messages == []:
            raise ValueError("messages is empty; it takes at least one")
        return request.prompt_ids is None

    async def prompt_ids_of_text(self, request: Generate) -> list[int]:
        """The ids of the request's prompt or messages."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; send prompt_ids")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, self._tokenize, request)

    def text_of(self, token_ids: list[int]) -> str:
        """The text of ids, special ones included. Raises ValueError for ids that do not exist, and without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer")
        if len(token_ids) > MAX_CHARS_PER_TOKEN * self.limits.max_model_len:
            raise ValueError(f"tokens may have at most {MAX_CHARS_PER_TOKEN * self.limits.max_model_len} ids, got {len(token_ids)}")
        for token in {min(token_ids, default=0), max(token_ids, default=0)}:
            if not 0 <= token < self.limits.vocab_size:
                raise ValueError(f"tokens must hold ids between 0 and {self.limits.vocab_size - 1}, got {token}")
        return self.tokenizer.decode(token_ids, skips_special=False)

    def admit(
        self, prompt_ids: list[int], params: SamplingParams, cache_salt: str | None = None, priority: int = 0, scope: bytes = b""
    ) -> Admitted:
        """Check ids and parameters against the limits and resolve the rest. Requests of different scopes share no prefixes."""
        salt = (cache_salt or "").encode("utf-8", "surrogatepass")
        if len(salt) > MAX_SALT_BYTES:
            raise ValueError(f"cache_salt may have at most {MAX_SALT_BYTES} bytes, got {len(salt)}")
        self._check_priority(priority)
        params = self.defaults.fill(params)
        check_sampling(params, self.limits.vocab_size)
        self._check_prompt(prompt_ids)
        room = self.limits.max_model_len - len(prompt_ids)
        max_tokens = min(room, params.max_tokens or room)
        if (params.min_tokens or 0) > max_tokens:
            limit = "max_tokens" if max_tokens < room else "the room that the prompt leaves"
            raise ValueError(f"min_tokens must be at most {max_tokens}, {limit}, got {params.min_tokens}")
        sampling, end_ids = row_sampling(params, self.random.getrandbits(64) - 2**63), self._end_ids(params)
        return Admitted(
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            end_ids=end_ids,
            stops=params.stop_strings,
            sampling=sampling,
            salt=scope + salt,
            priority=priority,
            more_seeds=[choice_seed(sampling.seed, index) for index in range(1, params.n or 1)],
            controls=resolve_controls(params, sampling, end_ids, self.tokenizer, self.limits.vocab_size),
            num_logprobs=params.logprobs,
            num_prompt_logprobs=params.prompt_logprobs,
            skips_special=params.skip_special_tokens,
            shows_stop=params.include_stop_str_in_output,
        )

    def _tokenize(self, request: Generate) -> list[int]:
        if request.messages is None:
            self._check_size("prompt", len(request.prompt))
            return self.tokenizer.encode(request.prompt, request.add_special_tokens)
        self._check_size("messages", sum(len(message.content) for message in request.messages))
        text = self.tokenizer.render([_named(message) for message in request.messages])
        self._check_size("messages, as the chat template renders them,", len(text))
        return self.tokenizer.encode(text, request.add_special_tokens)

    def _check_size(self, what: str, num_chars: int) -> None:
        most = self.limits.max_model_len * MAX_CHARS_PER_TOKEN
        if num_chars > most:
            raise ValueError(f"{what} may have at most {most} characters, got {num_chars}: {TOO_LONG}")

    def _check_priority(self, priority: int) -> None:
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise ValueError(f"priority must be between {MIN_PRIORITY} and {MAX_PRIORITY}, got {priority}")
        if priority and not self.takes_priority:
            raise ValueError(f"priority must be 0 with --scheduling-policy fcfs, got {priority}")

    def _check_prompt(self, prompt_ids: list[int]) -> None:
        limit = self.limits.max_model_len
        if not prompt_ids:
            raise ValueError("the prompt is empty")
        if len(prompt_ids) >= limit:
            raise ValueError(f"{TOO_LONG}: it has {len(prompt_ids)} tokens, which leaves no room in the context length of {limit}")
        for token in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token < self.limits.vocab_size:
                raise ValueError(f"prompt_ids must hold ids between 0 and {self.limits.vocab_size - 1}, got {token}")

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        """The model's own, unless ignored, and the client's.

        A stop string that spells a special token stops at its id: that token has no text.
        """
        special_ids = {} if self.tokenizer is None else self.tokenizer.special_ids
        by_text = {special_ids[stop] for stop in params.stop_strings if stop in special_ids}
        return frozenset(params.stop_token_ids or ()) | by_text | (frozenset() if params.ignore_eos else self.model_end_ids)


def _named(message: ChatMessage) -> dict[str, str]:
    return {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
