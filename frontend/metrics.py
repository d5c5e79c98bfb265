"""Counts and times of requests, as one frontend sees them: cheap to record, to send and to add up."""

from bisect import bisect_left
from collections import Counter

from frontend.request import OpenRequest
from protocol.messages import FrontendReport
from protocol.metrics import LATENCY_S, NUM_PREEMPTIONS, NUM_TOKENS, TIME_TO_FIRST_TOKEN_S, TOKEN_GAP_S

# name -> upper bounds of its buckets
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": TIME_TO_FIRST_TOKEN_S,
    "inter_token_latency_seconds": TOKEN_GAP_S,
    "request_time_per_output_token_seconds": TOKEN_GAP_S,
    "e2e_request_latency_seconds": LATENCY_S,
    "request_queue_time_seconds": LATENCY_S,
    "request_prefill_time_seconds": LATENCY_S,
    "request_decode_time_seconds": LATENCY_S,
    "request_inference_time_seconds": LATENCY_S,
    "request_prompt_tokens": NUM_TOKENS,
    "request_generation_tokens": NUM_TOKENS,
    "request_num_preemptions": NUM_PREEMPTIONS,
}


class Histogram:
    """How many values fell into each bucket: up to each bound, and above the last."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class RequestMetrics:
    """What one frontend has counted since its start. Recording never raises: all values are times or sizes of its own making."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self.finished: Counter[str] = Counter()  # by reason
        self.rejected: Counter[str] = Counter()  # by reason; the scheduler counts those of its own
        self.num_prompt_tokens = self.num_generated_tokens = 0
        self.num_malformed = self.num_slow_readers = 0

    def tokens(self, request: OpenRequest, now: float) -> None:
        """Tokens of a choice have arrived."""
        times, num_new = request.times, request.num_generated - request.num_timed
        request.num_timed = request.num_generated
        self.num_generated_tokens += num_new
        if times.first_token is None:
            times.first_token = now
            self.histograms["time_to_first_token_seconds"].add(now - times.arrived)
            num_new -= 1
            if request.index == 0:
                self.num_prompt_tokens += request.choices.num_prompt
        if num_new > 0:
            self.histograms["inter_token_latency_seconds"].add((now - times.last_token) / num_new, num_new)
        times.last_token = now

    def end(self, request: OpenRequest, now: float) -> None:
        """A choice has ended, in whatever way."""
        times, add = request.times, self._add
        self.finished[request.finish_reason] += 1
        add("e2e_request_latency_seconds", now - times.arrived)
        add("request_generation_tokens", request.num_generated)
        if request.index == 0:
            add("request_prompt_tokens", request.choices.num_prompt)
        if times.first_token is None or times.started is None:
            return  # aborted while it waited, or as it began
        add("request_queue_time_seconds", times.waited_s)
        add("request_num_preemptions", times.num_preemptions)
        add("request_prefill_time_seconds", max(0.0, times.first_token - times.started))
        add("request_decode_time_seconds", times.last_token - times.first_token)
        add("request_inference_time_seconds", max(0.0, times.last_token - times.started))
        if request.num_generated > 1:
            add("request_time_per_output_token_seconds", (times.last_token - times.first_token) / (request.num_generated - 1))

    def _add(self, name: str, value: float) -> None:
        self.histograms[name].add(value)

    def report(self) -> FrontendReport:
        """All of it, for whoever adds up several frontends'."""
        return FrontendReport(
            histograms={name: (histogram.counts, histogram.total) for name, histogram in self.histograms.items()},
            finished=dict(self.finished),
            rejected=dict(self.rejected),
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_malformed=self.num_malformed,
            num_slow_readers=self.num_slow_readers,
        )


def add_up(reports: list[FrontendReport]) -> FrontendReport:
    """The sum of the reports of one frontend or more."""
    finished, rejected, sums = Counter(), Counter(), Counter()
    histograms = {}
    for name in HISTOGRAMS:
        parts = [report.histograms[name] for report in reports]
        histograms[name] = ([sum(column) for column in zip(*(counts for counts, _ in parts))], sum(total for _, total in parts))
    for report in reports:
        finished.update(report.finished)
        rejected.update(report.rejected)
        sums.update({name: getattr(report, name) for name in report.__struct_fields__ if name.startswith("num_")})
    return FrontendReport(histograms, dict(finished), dict(rejected), **sums)
