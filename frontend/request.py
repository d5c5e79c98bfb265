"""One open request: from the scheduler's tokens to the text that its client sees."""

from collections.abc import Callable

import msgspec

from frontend.detokenizer import Detokenizer
from frontend.scores import PackedScores, TokenScores
from frontend.stops import StopStrings
from protocol.messages import FinishReason, Usage


class Delta(msgspec.Struct, frozen=True):
    """What is new for a choice of a request; its last one has a `finish_reason`, that of the last choice to end has the usage."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0  # of the choice
    scores: PackedScores | None = None  # of token_ids, where asked for
    prompt_scores: PackedScores | None = None  # of the prompt but for its first token, once


def join_deltas(deltas: list[Delta]) -> Delta:
    """All that came for a choice, as if it had come at once."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return msgspec.structs.replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        scores=None if last.scores is None else PackedScores.join([delta.scores for delta in deltas]),
        prompt_scores=next((delta.prompt_scores for delta in deltas if delta.prompt_scores is not None), None),
    )


class Failure(msgspec.Struct, frozen=True):
    """The request ends without a result."""

    code: int  # as an HTTP status
    message: str


Listener = Callable[[Delta | Failure], None]


class Times:
    """When what happened to a choice, in seconds of the monotonic clock."""

    def __init__(self, arrived: float, submitted: float):
        self.arrived, self.submitted = arrived, submitted  # at the door, and to the scheduler once its text was tokenised
        self.started: float | None = None  # out of the queue
        self.first_token: float | None = None
        self.last_token = arrived
        self.waited_s = 0.0  # in the queue
        self.num_preemptions = 0


class Choices:
    """What the choices of one request have in common: their handles, one each, and who hears of them."""

    def __init__(self, handles: range, num_prompt: int, listener: Listener):
        self.handles = handles
        self.num_prompt = num_prompt
        self.listener = listener
        self.num_cached = 0  # prompt tokens that the first choice found in the prefix cache
        self.num_generated = 0  # by choices that have ended
        self.num_open = len(handles)

    def end(self, num_generated: int) -> Usage | None:
        """A choice has ended; the usage if it was the last."""
        self.num_generated += num_generated
        self.num_open -= 1
        return None if self.num_open else Usage(self.num_prompt, self.num_generated, self.num_cached)


class OpenRequest:
    """The state of one choice between its admission and its last delta.

    `text` and `token_ids` gather what `take_delta` hands out next. Ids that end the output are delivered, but are no part of its
    text unless stops are shown.
    """

    def __init__(
        self,
        choices: Choices,
        index: int,
        end_ids: frozenset[int],
        detokenizer: Detokenizer | None,
        stops: list[str],
        min_tokens: int,
        scores: TokenScores,
        streams: bool = True,
        shows_stop: bool = False,
        times: Times | None = None,
    ):
        self.choices = choices
        self.index = index
        self.end_ids = end_ids
        self.detokenizer = detokenizer
        self.stops = StopStrings(stops, shows_stop)
        self.min_tokens = min_tokens
        self.scores = scores
        self.streams = streams  # else everything is wanted at once, at the end
        self.has_begun = False  # a delta was taken
        self.times = times or Times(0.0, 0.0)
        self.num_timed = 0  # tokens that the metrics have been told of
        self.num_generated = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def handle(self) -> int:
        """The scheduler's name for it."""
        return self.choices.handles[self.index]

    def accept(self, token: int, score: bytes | None = None) -> None:
        """Take the next token, with its score where asked for.

        A stop string in its text sets `finish_reason`; tokens after that are dropped.
        """
        if self.finish_reason is not None:
            return
        self.num_generated += 1
        self.token_ids.append(token)
        if score is not None:
            self.scores.add(token, score)
        if self.detokenizer is not None and (token not in self.end_ids or self.stops.are_shown):
            self._add_text(self.detokenizer.feed(token))

    def finish(self, reason: FinishReason) -> None:
        """End the output, unless a stop string has ended it; what was held back is let go."""
        if self.finish_reason is not None:
            return
        if self.detokenizer is not None:
            self._add_text(self.detokenizer.flush())
        if self.finish_reason is None:
            self.text += self.stops.flush()
            self.finish_reason = reason

    def is_due(self, interval: int) -> bool:
        """Whether its listener is to hear of it now: of the first tokens at once, then of so many together, at the end of all."""
        if self.finish_reason is not None:
            return True
        return self.streams and (not self.has_begun or len(self.token_ids) >= interval)

    def take_delta(self) -> Delta:
        """What came since the last call."""
        self.has_begun = True
        usage = None if self.finish_reason is None else self.choices.end(self.num_generated)
        scores, prompt_scores = self.scores.take(has_tokens=bool(self.token_ids))
        delta = Delta(self.text, self.token_ids, self.finish_reason, usage, self.index, scores, prompt_scores)
        self.text, self.token_ids = "", []
        return delta

    def _add_text(self, text: str) -> None:
        if self.num_generated <= self.min_tokens:  # stop strings are looked for behind these tokens only
            self.text += text
            return
        text, stopped = self.stops.feed(text)
        self.text += text
        if stopped:
            self.finish_reason = "stop"
