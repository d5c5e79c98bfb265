"""What every benchmark says about itself."""

import importlib.metadata
import platform
import statistics
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def facts() -> dict[str, str]:
    """What figures depend on: commit, device, versions."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "triton")}
    return {"commit": commit, "device": device_name(), "python": platform.python_version(), **versions}


def device_name() -> str:
    """The GPU where there is one, else the processor."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))


def quantiles(values: list[float], digits: int = 3) -> dict[str, float]:
    """p20, p50 and p80."""
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": round(cuts[1], digits), "p50": round(statistics.median(values), digits), "p80": round(cuts[7], digits)}
