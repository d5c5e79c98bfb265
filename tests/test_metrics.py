"""What /metrics tells: vLLM's names and labels, sums that agree with what clients were told, and nothing that a load can break."""

import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from frontend.client import Client
from frontend.metrics import HISTOGRAMS, Histogram, RequestMetrics, add_up
from tests.checksum_reference import continuation
from tests.engine_process import EngineProcess
from tests.test_checksum_engine import FLAGS, idle_stats, run_clients

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "last_step_age_seconds", "cache_config_info")
COUNTERS = (
    "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "admission_rejections_total", "malformed_frames_total", "slow_readers_total", "steps_total",
)  # fmt: skip


def scrape(url: str) -> dict[str, dict[tuple, float]]:
    """Each sample's value by name without prefix, then by its labels beyond the model's and the engine's."""
    response = httpx.get(f"{url}/metrics", timeout=10)
    assert response.status_code == 200
    samples: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name not in ("model_name", "engine")))
            samples.setdefault(sample.name.split(":", 1)[1], {})[labels] = sample.value
    return samples


def value(samples: dict[str, dict[tuple, float]], name: str, **labels: str) -> float:
    return samples[name][tuple(sorted(labels.items()))]


def complete(url: str, **body) -> dict:
    response = httpx.post(f"{url}/v1/completions", json={"prompt": [1, 2, 3], "temperature": 0} | body, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def engine():
    with EngineProcess(*FLAGS, "--max-num-seqs", "8") as engine:
        yield engine


def test_names_labels_and_buckets_are_those_that_boards_of_vllm_read(engine):
    complete(engine.url, max_tokens=2)
    families = {family.name: family for family in text_string_to_metric_families(httpx.get(f"{engine.url}/metrics").text)}
    samples = scrape(engine.url)
    for name in (*GAUGES, *COUNTERS):
        assert name in samples, name
    for name in (*HISTOGRAMS, "iteration_tokens_total"):
        family = families[f"stepahead:{name}"]
        assert family.type == "histogram" and {sample.labels["model_name"] for sample in family.samples} == {"checksum"}
        bounds = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
        assert bounds == sorted(bounds) and bounds[-1] == float("inf")
    first = [float(labels[0][1]) for labels in samples["time_to_first_token_seconds_bucket"]]
    assert (min(first), max(first[:-1])) == (0.001, 2560.0)
    assert {0.001, 0.0025, 0.005, 0.01, 80.0} <= {float(labels[0][1]) for labels in samples["inter_token_latency_seconds_bucket"]}


def test_the_prefix_is_the_flags_and_both_text_formats_are_served():
    with EngineProcess(*FLAGS, "--metrics-prefix", "vllm") as engine:
        plain = httpx.get(f"{engine.url}/metrics")
        assert plain.headers["content-type"].startswith("text/plain") and "vllm:num_requests_running" in plain.text
        assert "stepahead:" not in plain.text
        openmetrics = httpx.get(f"{engine.url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert openmetrics.headers["content-type"].startswith("application/openmetrics-text") and openmetrics.text.endswith("# EOF\n")
        head = httpx.head(f"{engine.url}/metrics")
        assert (head.status_code, head.text) == (200, "")


def test_token_counts_and_reasons_are_those_that_clients_were_told(engine):
    before = scrape(engine.url)
    answers = [complete(engine.url, max_tokens=7, n=2), complete(engine.url, prompt=[[4], [5, 6]], max_tokens=11)]
    stopped = complete(engine.url, prompt=[9], max_tokens=50, stop_token_ids=[continuation([9], 50)[10]])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert httpx.post(f"{engine.url}/v1/completions", json={"prompt": [1], "n": 0}).status_code == 400
    with Client(engine.address) as client:
        *_, last = client.generate(prompt_ids=[7, 7], max_tokens=5)
        leaving = client.generate(prompt_ids=[8], max_tokens=4000)
        next(leaving)
        leaving.close()
        idle_stats(client)
    after = scrape(engine.url)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    counted = [answer["usage"] for answer in [*answers, stopped]]
    assert grown("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in counted) + last.usage.prompt_tokens + 1
    aborted_tokens = grown("generation_tokens_total") - sum(usage["completion_tokens"] for usage in counted) - last.usage.completion_tokens
    assert 1 <= aborted_tokens < 4000
    reasons = {reason: grown("request_success_total", finished_reason=reason) for reason in ("stop", "length", "abort", "error")}
    assert reasons == {"stop": 1, "length": 5, "abort": 1, "error": 0}
    assert grown("admission_rejections_total", reason="invalid") == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens", "request_queue_time_seconds"):
        assert grown(f"{name}_count") == 7, name  # choices
        assert grown(f"{name}_bucket", le="+Inf") == 7
    assert grown("request_generation_tokens_sum") == grown("generation_tokens_total")


@pytest.mark.parametrize("depth", ["1", "4"])
def test_scrapes_during_preemptions_hits_and_aborts_see_counters_grow_and_gauges_return_to_zero(depth):
    flags = ("--max-num-seqs", "16", "--num-kv-blocks", "45", "--max-model-len", "600", "--max-pipeline-depth", depth)
    with EngineProcess(*FLAGS, *flags) as engine, Client(engine.address) as client:
        pages, is_over = [], threading.Event()
        scraper = threading.Thread(target=lambda: [pages.append(scrape(engine.url)) or time.sleep(0.1) for _ in iter(is_over.is_set, True)])
        scraper.start()
        run_clients(engine.address, count=2, num_requests=60, abort_share=1 / 3, most_tokens=200)
        run_clients(engine.address, count=2, num_requests=60, abort_share=1 / 3, most_tokens=200)  # the same again: prefix hits
        is_over.set()
        scraper.join()
        idle_stats(client)
        last = scrape(engine.url)
    assert len(pages) > 10 and any(value(page, "num_requests_running") > 0 for page in pages)
    for earlier, later in zip(pages, [*pages[1:], last], strict=True):
        for name, samples in earlier.items():
            if name.endswith(("_total", "_count", "_bucket", "_sum")):
                assert all(later[name][labels] >= number for labels, number in samples.items()), name
    assert value(last, "num_preemptions_total") > 0 and value(last, "prefix_cache_hits_total") > 0
    assert [value(last, name) for name in GAUGES[:4]] == [0, 0, 0, 0]
    assert sum(last["request_success_total"].values()) == 4 * 60
    running = [value(last, "iteration_tokens_total_bucket", le="+Inf"), value(last, "steps_total")]
    assert running[0] == running[1]


def test_a_queue_shows_while_rows_are_taken():
    with EngineProcess(*FLAGS, "--max-num-seqs", "1") as engine, Client(engine.address) as client:
        running = client.generate(prompt_ids=[5], max_tokens=4000)
        next(running)
        body = {"prompt": [6], "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", f"{engine.url}/v1/completions", json=body):  # its headers come before its first token
            page = scrape(engine.url)
        assert value(page, "num_requests_running") == value(page, "num_requests_waiting") == 1
        assert value(page, "num_requests_waiting_by_reason", reason="capacity") == 1
        assert 0 < value(page, "kv_cache_usage_perc") <= 1
        running.close()


def test_a_histogram_counts_up_to_each_bound():
    histogram = Histogram((1.0, 2.0))
    for number in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(number)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 14.0)


def test_reports_of_several_frontends_add_up():
    reports = []
    for number in (1, 2):
        metrics = RequestMetrics()
        metrics.finished["stop"] += number
        metrics.num_generated_tokens = 10 * number
        metrics.histograms["request_prompt_tokens"].add(number, times=number)
        reports.append(metrics.report())
    total = add_up(reports)
    assert (total.finished, total.num_generated_tokens) == ({"stop": 3}, 30)
    counts, tokens = total.histograms["request_prompt_tokens"]
    assert (sum(counts), tokens) == (3, 5.0)
