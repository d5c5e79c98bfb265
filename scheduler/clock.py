"""How long a step takes and how long a message: measured from when steps are sent and confirmed."""

from scheduler.policy import pipeline_depth

SMOOTHING = 0.1  # weight of the newest measurement


class StepClock:
    """Estimates of the step time and of the channels' round trip, in seconds.

    A step sent into an empty pipeline comes back after a round trip and a step. Where another step was waiting at the worker when
    one came back, the next one comes a step later. 0 until measured.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        self.round_trip_s = 0.0
        self.decode_s = 0.0  # a step without prompt tokens
        self.prompt_token_s = 0.0  # what each prompt token adds to a step
        self.gap_s = 0.0  # when there was work and nothing in flight, summed
        self.waiting_since: float | None = None  # when the oldest step in flight was sent, or the last result came; None: at rest
        self._empty_since: float | None = None
        self._sent_alone: tuple[int, float] | None = None  # the last step that left into an empty pipeline, and when
        self._last_confirmed: float | None = None  # when the last result came, if a step was in flight then

    def sent(self, step: int, now: float, num_in_flight: int) -> None:
        """A step has left; num_in_flight counts it."""
        if num_in_flight == 1:
            self._sent_alone = (step, now)
            self.waiting_since = now
            if self._empty_since is not None:
                self.gap_s += now - self._empty_since
                self._empty_since = None

    def confirmed(self, step: int, now: float, num_in_flight: int, num_prompt_tokens: int = 0) -> None:
        """A step's result has come; num_in_flight are still on their way."""
        if self._last_confirmed is not None:
            self.step_s = _blend(self.step_s, now - self._last_confirmed)
            self._split(now - self._last_confirmed, num_prompt_tokens)
        if self._sent_alone is not None and self._sent_alone[0] == step and self.step_s:
            self.round_trip_s = _blend(self.round_trip_s, max(0.0, now - self._sent_alone[1] - self.step_s))
        self._last_confirmed = now if num_in_flight else None
        self._empty_since = None if num_in_flight else now
        self.waiting_since = now if num_in_flight else None

    def _split(self, step_s: float, num_prompt_tokens: int) -> None:
        if num_prompt_tokens == 0:
            self.decode_s = _blend(self.decode_s, step_s)
        else:
            self.prompt_token_s = _blend(self.prompt_token_s, max(1e-6, step_s - self.decode_s) / num_prompt_tokens)

    def rested(self) -> None:
        """Nothing is in flight, since there is nothing to do: not a gap."""
        self._empty_since = None

    def depth(self, most: int, has_waiting: bool) -> int:
        """Steps to keep in flight."""
        return pipeline_depth(most, self.step_s, self.round_trip_s, has_waiting)


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + SMOOTHING * (new - old)
