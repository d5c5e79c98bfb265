"""Which kernel computes what: measured on this device at load, and remembered on disk.

A candidate is timed in its place, in a graph of whole decode steps: launches overlap, so what a product takes alone says little of
what it costs (0.6B shape, batch 1, H200: products chosen alone made a step of 0.60 ms). Buckets between two powers of two take the
larger one's choice. B = rows of the step
"""

import copy
import hashlib
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
import triton
from tqdm import tqdm

from kernels.candidates import candidates, head_candidates
from kernels.decode_attention import decode_configs
from kernels.head import Head
from worker.decode import BucketPlan, DecodeChain, head_of, layer_projections
from worker.model import TransformerModel
from worker.model_config import ModelConfig
from worker.parameters import weight_bytes
from worker.rows import RowState, SamplingKind

log = logging.getLogger(__name__)

PRODUCTS = ("qkv", "out", "gate_up", "down")
REPLAYS = 7
PASSES = 2  # what is best for a kernel depends on its neighbours
# Layers enough for no cache to hold their weights; more would only take longer.
TIMED_BYTES = 400e6
# Tokens in every row while steps are timed, and the shortest limit on them with which they are.
TIMED_CONTEXT, SHORTEST_TIMED = 512, 64


def plan_buckets(
    model: TransformerModel, buckets: list[int], sampled_vocab: int, cache_dir: Path | None, tune: bool
) -> dict[int, BucketPlan]:
    """The kernels of every bucket. Without `tune`, the first candidates: what won on an H200. With it the model's pools are written."""
    sizes = sorted({tuned_size(bucket) for bucket in buckets}, reverse=True)
    tune = tune and model.max_model_len >= SHORTEST_TIMED
    choices = MeasuredChoices(model, sizes[0], sampled_vocab, cache_dir) if tune else Choices(model, sampled_vocab)
    chosen = {size: choices.choose(size) for size in tqdm(sizes, desc="choosing kernels", disable=not tune)}
    choices.save()
    c, dtype = model.config, model.dtype
    return {bucket: replace(chosen[tuned_size(bucket)], projections=layer_projections(c, dtype, bucket)) for bucket in buckets}


def tuned_size(bucket: int) -> int:
    """The batch size at which a bucket's kernels are chosen."""
    return triton.next_power_of_2(bucket)


def attention_key(c: ModelConfig, bucket: int, max_model_len: int) -> str:
    """The description of a step's attention."""
    return f"Attention(rows={bucket}, heads={c.num_heads}, kv_heads={c.num_kv_heads}, head_dim={c.head_dim}, most={max_model_len})"


def head_key(head: Head) -> str:
    """The description of a head: greedy or not, over however many ids, the same kernel is the fastest."""
    return str(replace(head, sampled_vocab=head.vocab, has_chance=False))


@dataclass(frozen=True)
class Part:
    """A kernel of a step: its description, its configurations, and how a plan gets one of them."""

    key: str
    options: list
    put: Callable[[BucketPlan, object], BucketPlan]


def parts_of(c: ModelConfig, dtype: torch.dtype, bucket: int, sampled_vocab: int, max_model_len: int) -> list[Part]:
    """The kernels of a bucket that can be chosen. Of a plan's products each is put by its name."""

    def product(name: str) -> Part:
        projection = getattr(layer_projections(c, dtype, bucket), name)
        return Part(str(projection), candidates(projection), lambda plan, it: replace(plan, configs={**plan.configs, name: it}))

    head = head_of(c, dtype, bucket, sampled_vocab, has_chance=False)
    attentions = decode_configs(bucket, c.num_kv_heads, max_model_len)
    return [
        Part(attention_key(c, bucket, max_model_len), attentions, lambda plan, it: replace(plan, attention=it)),
        *map(product, PRODUCTS),
        Part(head_key(head), head_candidates(head), lambda plan, it: replace(plan, head=it)),
    ]


class Choices:
    """The kernels of buckets by number. `known` maps a kernel's description to the number of its configuration; others take the first."""

    def __init__(self, model: TransformerModel, sampled_vocab: int):
        self.model = model
        self.sampled_vocab = sampled_vocab
        self.known: dict[str, int] = {}

    def choose(self, bucket: int) -> BucketPlan:
        """The kernels of a bucket."""
        return self._plan(bucket, self._parts(bucket))

    def save(self) -> None:
        """Nothing to remember."""

    def _parts(self, bucket: int) -> list[Part]:
        model = self.model
        return parts_of(model.config, model.dtype, bucket, self.sampled_vocab, model.max_model_len)

    def _plan(self, bucket: int, parts: list[Part]) -> BucketPlan:
        plan = BucketPlan(layer_projections(self.model.config, self.model.dtype, bucket), {}, None, None)
        for part in parts:
            number = self.known.get(part.key, 0)
            plan = part.put(plan, part.options[number if number < len(part.options) else 0])
        return plan


class MeasuredChoices(Choices):
    """Changes one kernel after the other for the one that makes the step shortest. What it knows lasts over starts."""

    def __init__(self, model: TransformerModel, most: int, sampled_vocab: int, cache_dir: Path | None):
        super().__init__(model, sampled_vocab)
        self.most = most
        self.timed: tuple[TransformerModel, RowState] | None = None  # made when something is to be timed
        self.file = None if cache_dir is None else choices_file(cache_dir)
        self.known = load_choices(self.file)

    def choose(self, bucket: int) -> BucketPlan:
        """The kernels of a bucket."""
        parts = self._parts(bucket)
        plan = self._plan(bucket, parts)
        if not all(part.key in self.known for part in parts):
            for part in PASSES * parts:
                plan = self._improve(bucket, plan, part)
        return plan

    def save(self) -> None:
        """Remember the choices for the next start."""
        for pool in self.timed[0].kv_pools if self.timed else ():
            pool[0].zero_(), pool[1].zero_()
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_bytes(msgspec.json.format(msgspec.json.encode(self.known)))

    def _improve(self, bucket: int, plan: BucketPlan, part: Part) -> BucketPlan:
        times = [self._step_ms(bucket, part.put(plan, option)) for option in part.options]
        best = self.known[part.key] = times.index(min(times))
        log.info("%s: %s, steps of %.4f to %.4f ms", part.key, part.options[best], min(times), max(times))
        return part.put(plan, part.options[best])

    def _step_ms(self, bucket: int, plan: BucketPlan) -> float:
        model, rows = self.timed = self.timed or (first_layers(self.model), filled_rows(self.model, self.most, TIMED_CONTEXT))
        chain = DecodeChain(model, rows, self.sampled_vocab, {bucket: plan}, pdl=True)
        rows_B = torch.arange(bucket, dtype=torch.int32, device=model.device)
        rows.length_R[:bucket] = min(TIMED_CONTEXT, model.max_model_len - REPLAYS - 3)
        return graph_ms(lambda: chain.run(rows_B, SamplingKind.GREEDY))


def first_layers(model: TransformerModel) -> TransformerModel:
    """The model without its later layers, its pools filled."""
    layers, size = model.weights.layers, weight_bytes(model.weights, model.config)
    count = min(len(layers), max(1, round(TIMED_BYTES / size * len(layers))))
    part = copy.copy(model)
    part.weights, part.kv_pools = replace(model.weights, layers=layers[:count]), model.kv_pools[:count]
    for k_pool, v_pool in part.kv_pools:
        k_pool.normal_(), v_pool.normal_()  # zeros are faster than what will come
    return part


def filled_rows(model: TransformerModel, most: int, context: int) -> RowState:
    """Rows with room for `context` tokens, whose blocks lie in random order. A small pool's blocks belong to several rows."""
    num_blocks, _, block_size, _ = model.kv_pools[0][0].shape
    rows = RowState(most, -(-model.max_model_len // block_size), num_blocks - 1, model.device)
    shape = most, min(rows.block_table_RB.shape[1], context // block_size + 2)
    blocks = torch.randperm(max(num_blocks - 1, shape[0] * shape[1]), device=model.device)[: shape[0] * shape[1]]
    rows.block_table_RB[:most, : shape[1]] = (blocks % (num_blocks - 1)).to(torch.int32).view(shape)
    return rows


def graph_ms(launch: Callable[[], None]) -> float:
    """Median milliseconds of a graph of these launches; infinity where one does not fit the device."""
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
