"""Four load generators that people measure servers with, each in an environment of its own: none of them may see an error.

They take gigabytes and minutes, so they run with `make loadgen` only.
"""

import csv
import json
import os
import subprocess
from pathlib import Path

import pytest

from frontend.client import Client
from tests.engine_process import ROOT, EngineProcess
from tests.load_tokenizer import write_tokenizer
from tests.test_checksum_engine import assert_back_to_start, idle_stats
from tests.test_metrics import scrape, value

MODEL = "smollm2-135m"
NUM_REQUESTS, STREAMS, PROMPT_TOKENS, NEW_TOKENS = 24, 4, 32, 16
pytestmark = [pytest.mark.loadgen, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine():
    with EngineProcess("--model", MODEL, "--metrics-prefix", "vllm") as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, smollm2) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(smollm2, folder)
    return folder


@pytest.fixture(autouse=True)
def nothing_left(engine):
    """After each tool, every row and block is back."""
    yield
    with Client(engine.address, timeout=60) as client:
        assert_back_to_start(idle_stats(client, within_s=10))


def run(name: str, program: str, *arguments: object, cwd: Path) -> str:
    """What a tool prints; skips where its environment is not installed."""
    folder = ROOT / f".venv-{name}"
    if not (folder / "installed").exists():
        pytest.skip(f"needs `make .venv-{name}/installed`")
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(cwd), "COLUMNS": "200"}
    command = [folder / "bin" / program, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_guidellm(engine, tokenizer, tmp_path):
    run(
        "guidellm", "guidellm", "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={engine.url},model={MODEL}",
        "--profile", f"kind=concurrent,streams={STREAMS}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
        cwd=tmp_path,
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    print(f"\nguidellm: {totals}, {benchmark['duration']:.1f} s")
    assert (totals["errored"], totals["incomplete"]) == (0, 0) and totals["successful"] > NUM_REQUESTS / 2


def test_aiperf_with_cancellation(engine, tokenizer, tmp_path):
    before = value(scrape(engine.url), "request_success_total", finished_reason="abort")
    run(
        "aiperf", "aiperf", "profile", "--model", MODEL, "--url", engine.url, "--endpoint-type", "chat", "--streaming", "--ui", "none",
        "--tokenizer", tokenizer, "--concurrency", STREAMS, "--request-count", NUM_REQUESTS,
        "--synthetic-input-tokens-mean", PROMPT_TOKENS, "--output-tokens-mean", NEW_TOKENS, "--extra-inputs", "ignore_eos:true",
        "--request-cancellation-rate", "30", "--request-cancellation-delay", "0.3", "--output-artifact-dir", tmp_path / "report",
        cwd=tmp_path,
    )  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / "report" / "profile_export.jsonl").read_text().splitlines()]
    cancelled = [record for record in records if record["metadata"]["was_cancelled"]]
    errors = [record["error"] for record in records if record.get("error") and not record["metadata"]["was_cancelled"]]
    aborted = value(scrape(engine.url), "request_success_total", finished_reason="abort") - before
    print(f"\naiperf: {len(records)} requests, {len(cancelled)} cancelled ({aborted:.0f} aborted here), {len(errors)} errors")
    assert len(records) == NUM_REQUESTS and not errors
    assert 0 < aborted <= len(cancelled) < NUM_REQUESTS


def test_sglangs_bench(engine, tokenizer, tmp_path):
    run(
        "sglang", "python", "-m", "sglang.benchmark.serving", "--backend", "vllm-chat", "--base-url", engine.url, "--model", MODEL,
        "--tokenizer", tokenizer, "--dataset-name", "random-ids", "--random-input-len", PROMPT_TOKENS, "--random-output-len", NEW_TOKENS,
        "--num-prompts", NUM_REQUESTS, "--max-concurrency", STREAMS, "--output-file", tmp_path / "report.json",
        cwd=tmp_path,
    )  # fmt: skip
    found = json.loads((tmp_path / "report.json").read_text())
    print(f"\nsglang: {found['completed']} completed, {found['total_output_tokens']} tokens, {found['duration']:.1f} s")
    assert found["completed"] == NUM_REQUESTS
    assert found["total_output_tokens"] == pytest.approx(found["total_output_tokens_retokenized"], rel=0.1)


def test_locust(engine, tmp_path):
    script = ROOT / "tests" / "client_scripts" / "locustfile.py"
    run(
        "locust", "locust", "-f", script, "--headless", "--host", engine.url, "--users", STREAMS, "--spawn-rate", STREAMS,
        "--run-time", "20s", "--stop-timeout", "30s", "--csv", tmp_path / "report", "--only-summary",
        cwd=tmp_path,
    )  # fmt: skip
    *rows, total = csv.DictReader((tmp_path / "report_stats.csv").open())
    print(f"\nlocust: {total['Request Count']} requests, {total['Failure Count']} failures; {[row['Name'] for row in rows]}")
    assert int(total["Failure Count"]) == 0 and {row["Name"] for row in rows} == {"left", "streamed", "whole"}
    assert all(int(row["Request Count"]) > 0 for row in rows)
