"""The page that Prometheus reads: vLLM's names and labels behind a prefix of ours."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from frontend.metrics import HISTOGRAMS
from protocol.config import EngineConfig
from protocol.messages import FrontendReport, Snapshot
from protocol.metrics import STEP_TOKENS

LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """One snapshot of the scheduler and the sum of the frontends' reports, as metric families."""

    def __init__(self, config: EngineConfig, snapshot: Snapshot, report: FrontendReport):
        self.config, self.snapshot, self.report = config, snapshot, report
        self.values = (config.served_model_name, "0")

    def collect(self) -> Iterator[Metric]:
        """In the order of the page."""
        yield from self._gauges()
        yield from self._counters()
        for name, bounds in HISTOGRAMS.items():
            yield self._histogram(name, bounds, *self.report.histograms[name])
        yield self._histogram("iteration_tokens_total", STEP_TOKENS, self.snapshot.step_tokens, float(self.snapshot.num_step_tokens))

    def _gauges(self) -> Iterator[Metric]:
        stats = self.snapshot.stats
        used = 1 - stats.free_blocks / stats.total_blocks if stats.total_blocks else 0.0
        yield self._gauge("num_requests_running", "Requests with a row", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue", stats.num_waiting)
        reasons = {"capacity": stats.num_waiting}
        yield self._family(GaugeMetricFamily, "num_requests_waiting_by_reason", "Requests in the queue", reasons, "reason")
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks that are held, 0 to 1", used)
        yield self._gauge("last_step_age_seconds", "Time since a result of a step was due; 0 at rest", stats.step_age_us / 1e6)
        info = {
            "block_size": self.config.block_size, "num_gpu_blocks": stats.total_blocks, "cache_dtype": self.config.dtype,
            "enable_prefix_caching": self.config.enable_prefix_caching, "gpu_memory_utilization": self.config.gpu_memory_utilization,
            "num_cpu_blocks": stats.total_host_blocks,
        }  # fmt: skip
        family = GaugeMetricFamily(self._name("cache_config_info"), "How the KV cache is set up", labels=["engine", *info])
        family.add_metric(["0", *map(str, info.values())], 1)
        yield family

    def _counters(self) -> Iterator[Metric]:
        stats, report = self.snapshot.stats, self.report
        yield self._counter("num_preemptions", "Requests that lost their row", stats.num_preemptions)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.num_prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found there", stats.num_cached_tokens)
        yield self._counter("prompt_tokens", "Prompt tokens of requests that got a first token", report.num_prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens", report.num_generated_tokens)
        yield self._counter("steps", "Forward passes", stats.num_steps)
        yield self._counter("step_gap_seconds", "Time with requests running and no step in flight", stats.step_gap_us / 1e6)
        yield self._counter("malformed_frames", "Messages that could not be read", stats.num_malformed + report.num_malformed)
        yield self._counter("slow_readers", "Clients cut off for not reading", report.num_slow_readers)
        finished = {reason: report.finished.get(reason, 0) for reason in ("stop", "length", "abort", "error")}
        yield self._family(CounterMetricFamily, "request_success", "Choices that have ended", finished, "finished_reason")
        rejected = {
            "invalid": stats.num_refused_invalid, "queue_requests": stats.num_refused_queue_requests,
            "queue_tokens": stats.num_refused_queue_tokens, "queue_timeout": stats.num_queue_timeouts,
        }  # fmt: skip
        rejected |= {reason: rejected.get(reason, 0) + count for reason, count in report.rejected.items()}
        yield self._family(CounterMetricFamily, "admission_rejections", "Requests refused", rejected, "reason")

    def _name(self, name: str) -> str:
        return f"{self.config.metrics_prefix}:{name}"

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._family(GaugeMetricFamily, name, text, {"": value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._family(CounterMetricFamily, name, text, {"": value})

    def _family(self, kind: type[Metric], name: str, text: str, values: dict[str, float], label: str | None = None) -> Metric:
        family = kind(self._name(name), text, labels=[*LABELS, *([label] if label else [])])
        for value_of_label, value in values.items():
            family.add_metric([*self.values, *([value_of_label] if label else [])], value)
        return family

    def _histogram(self, name: str, bounds: Sequence[float], counts: list[int], total: float) -> Metric:
        family = HistogramMetricFamily(self._name(name), name.replace("_", " "), labels=LABELS)
        running, buckets = 0, []
        for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
            running += count
            buckets.append((bound, running))
        family.add_metric(self.values, buckets, total)
        return family


def render(config: EngineConfig, snapshot: Snapshot, report: FrontendReport, accept: str) -> tuple[bytes, str]:
    """The page and its content type, as the Accept header wants it."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(config, snapshot, report))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
