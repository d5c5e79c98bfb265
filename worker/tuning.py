"""Which kernel computes each product: measured on this device at load, and remembered on disk.

A candidate is timed as a graph over all layers' own weights, so that no cache holds them; the fastest wins. Buckets between two
powers of two take the larger one's choice. B = rows of the step
"""

import hashlib
import logging
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
import triton
from tqdm import tqdm

from kernels.candidates import Config, candidates, head_candidates
from kernels.head import Head, HeadConfig, head_sample
from kernels.projection import Operands, Projection, Scratch, allocate_scratch
from kernels.reference_fused import NOTHING
from worker.decode import BucketPlan, attention_plan, head_of, layer_projections, operands_of
from worker.model import TransformerModel

log = logging.getLogger(__name__)

PRODUCTS = ("qkv", "out", "gate_up", "down")
REPLAYS = 7


def plan_buckets(
    model: TransformerModel, buckets: list[int], sampled_vocab: int, cache_dir: Path | None, tune: bool
) -> dict[int, BucketPlan]:
    """The kernels of every bucket. Without `tune`, the first candidates: what won on an H200."""
    choices = MeasuredChoices(model, sampled_vocab, cache_dir) if tune else FirstChoices(model, sampled_vocab)
    sizes = sorted({tuned_size(bucket) for bucket in buckets}, reverse=True)
    chosen = {size: choices.choose(size) for size in tqdm(sizes, desc="choosing kernels", disable=not tune)}
    choices.save()
    return {bucket: _plan(model, bucket, *chosen[tuned_size(bucket)]) for bucket in buckets}


def tuned_size(bucket: int) -> int:
    """The batch size at which a bucket's kernels are chosen."""
    return triton.next_power_of_2(bucket)


def _plan(model: TransformerModel, bucket: int, configs: dict[str, Config], head: HeadConfig) -> BucketPlan:
    return BucketPlan(layer_projections(model.config, model.dtype, bucket), configs, attention_plan(model, bucket), head)


def head_key(head: Head) -> str:
    """The description of a head: greedy or not, over however many ids, the same kernel is the fastest."""
    return str(replace(head, sampled_vocab=head.vocab, has_chance=False))


class FirstChoices:
    """Takes every first candidate."""

    def __init__(self, model: TransformerModel, sampled_vocab: int):
        self.model = model
        self.sampled_vocab = sampled_vocab

    def choose(self, bucket: int) -> tuple[dict[str, Config], HeadConfig]:
        """The configuration of each product, and the head's."""
        projections = layer_projections(self.model.config, self.model.dtype, bucket)
        configs = {name: self._projection(name, getattr(projections, name)) for name in PRODUCTS}
        head = head_of(self.model.config, self.model.dtype, bucket, self.sampled_vocab, has_chance=False)
        return configs, self._head(head)

    def save(self) -> None:
        """Nothing to remember."""

    def _projection(self, name: str, projection: Projection) -> Config:
        return candidates(projection)[0]

    def _head(self, head: Head) -> HeadConfig:
        return head_candidates(head)[0]


class MeasuredChoices(FirstChoices):
    """Times the candidates. `known` maps a product's description to the number of the winner, and lasts over starts."""

    def __init__(self, model: TransformerModel, sampled_vocab: int, cache_dir: Path | None):
        super().__init__(model, sampled_vocab)
        self.file = None if cache_dir is None else choices_file(cache_dir)
        self.known = load_choices(self.file)

    def save(self) -> None:
        """Remember the choices for the next start."""
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_bytes(msgspec.json.format(msgspec.json.encode(self.known)))

    def _projection(self, name: str, projection: Projection) -> Config:
        found = candidates(projection)
        return self._fastest(str(projection), found, lambda config: self._projection_launches(name, projection, config))

    def _head(self, head: Head) -> HeadConfig:
        return self._fastest(head_key(head), head_candidates(head), lambda config: self._head_launches(head, config))

    def _fastest(self, key: str, found: list, launches_of: Callable) -> Config | HeadConfig:
        if key not in self.known or self.known[key] >= len(found):
            times = [graph_ms(launches_of(config)) for config in found]
            self.known[key] = times.index(min(times))
            log.info("%s: %s of %s, %.1f µs", key, self.known[key], len(found), min(times) * 1e3)
        return found[self.known[key]]

    def _projection_launches(self, name: str, projection: Projection, config: Config) -> Callable[[], None]:
        model, c, B = self.model, self.model.config, projection.rows

        def random(width: int) -> torch.Tensor:
            return torch.randn(B, width, dtype=model.dtype, device=model.device)

        x, qkv, attended, mlp = (random(n) for n in (c.hidden_size, c.qkv_size, c.num_heads * c.head_dim, c.intermediate_size))
        operands: list[Operands] = [operands_of(layer, x, qkv, attended, mlp)[name] for layer in model.weights.layers]
        scratch: Scratch = allocate_scratch([config.scratch_sizes(projection)], model.dtype, torch.device(model.device))

        def launch() -> None:
            for layer in operands:
                config.run(projection, layer, scratch, True)

        return launch

    def _head_launches(self, head: Head, config: HeadConfig) -> Callable[[], None]:
        model = self.model
        x_BD = torch.randn(head.rows, head.inputs, dtype=model.dtype, device=model.device)
        best_B = torch.full((head.rows,), NOTHING, dtype=torch.int64, device=model.device)

        def launch() -> None:
            head_sample(config, head, x_BD, model.weights.final_norm_D, model.weights.head_VD, best_B, None, True)

        return launch


def graph_ms(launch: Callable[[], None]) -> float:
    """Median milliseconds of a graph of these launches; infinity where they do not fit the device."""
    try:
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
    except (triton.runtime.errors.OutOfResources, torch.OutOfMemoryError):
        return float("inf")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    graph.replay()
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in zip(marks, marks[1:]))


def load_choices(file: Path | None) -> dict[str, int]:
    """What earlier starts have measured: the number of the winning candidate by the description of the product."""
    if file is None or not file.is_file():
        return {}
    return msgspec.json.decode(file.read_bytes(), type=dict[str, int])


def choices_file(cache_dir: Path) -> Path:
    """Where choices last, named after all that they depend on besides the product: the device, the compiler, the kernels' source."""
    digest = hashlib.sha256(f"{torch.cuda.get_device_name()} {triton.__version__} {torch.__version__}".encode())
    for path in sorted(Path(candidates.__code__.co_filename).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return cache_dir / f"kernels-{digest.hexdigest()[:16]}.json"
