"""From a path to a model that is ready to allocate its cache."""

import logging
from functools import lru_cache
from pathlib import Path

import torch

from kernels import ops, reference
from worker.gguf_weights import GgufFile
from worker.model import TransformerModel
from worker.model_config import ModelConfig, load_model_config
from worker.parameters import allocate_weights, by_name, fold_norms, weight_bytes
from worker.weights import SafetensorsFolder, TensorSource, check_fit, copy_weights

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(path: str, dtype: str, device: str, max_model_len: int | None, load_format: str = "auto") -> TransformerModel:
    """Load a safetensors folder or a .gguf file; load_format "dummy" takes a folder's config.json and random weights.

    dtype "auto" is float32 on a CPU and the checkpoint's own on a GPU; device "auto" is the GPU where there is one. max_model_len
    None takes the model's limit. Raises ValueError for what the user can mend: path, configuration, weights, limits.
    """
    device = resolve_device(device)
    config = open_config(Path(path))
    if config.experts is not None and device != "cpu":
        raise ValueError(f"{config.architecture} runs on a CPU only so far: --device cpu")
    limit = resolve_max_model_len(config, max_model_len)
    run_as = resolve_dtype(dtype, config.dtype, device)
    source = None if load_format == "dummy" else open_checked(Path(path), config)
    weights = allocate_weights(config, run_as, device)
    if source is None:
        fill_randomly(by_name(weights, config))
    else:
        copy_weights(source, by_name(weights, config))
    gib, run_dtype = weight_bytes(weights, config) / 2**30, weights.embedding_VD.dtype
    log.info("loaded %s: %s, %.2f GiB in %s on %s", path, config.architecture, gib, run_dtype, device)
    if device == "cpu":
        return TransformerModel(config, weights, reference, limit)
    return TransformerModel(config, fold_norms(weights), ops, limit)


def resolve_device(asked: str) -> str:
    """The device to run on. Raises ValueError when a GPU is asked for and there is none."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs an NVIDIA GPU and a torch build for it; torch finds none here")
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def fill_randomly(weights: dict[str, torch.Tensor]) -> None:
    """Random weights of a trained model's magnitude: for measuring speed, which does not depend on them."""
    torch.manual_seed(0)
    for name, weight in weights.items():
        if "norm" in name:
            weight.fill_(1.0)
        else:
            weight.normal_(std=0.02)


def open_config(path: Path) -> ModelConfig:
    """A checkpoint's configuration. Raises ValueError."""
    if path.is_dir():
        return load_model_config(path)
    return _gguf_file(path).config


def open_checked(path: Path, config: ModelConfig) -> TensorSource:
    """A checkpoint's tensors, which are those that the configuration asks for. Raises ValueError."""
    source = SafetensorsFolder(path) if path.is_dir() else _gguf_file(path)
    shapes = by_name(allocate_weights(config, torch.float32, "meta"), config)
    try:
        check_fit(source, shapes, ignored=["lm_head.weight"] if config.tie_word_embeddings else [])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return source


@lru_cache(maxsize=1)  # read for the configuration, and again for the tensors
def _gguf_file(path: Path) -> GgufFile:
    if path.is_file() and path.suffix == ".gguf":
        return GgufFile(path)
    raise ValueError(f"{path} is neither a model folder nor a .gguf file" if path.exists() else f"{path} does not exist")


def resolve_max_model_len(config: ModelConfig, asked: int | None) -> int:
    """The limit on a sequence. Raises ValueError when more is asked than the model can do."""
    if asked is not None and asked > config.max_model_len:
        raise ValueError(f"max_model_len must be at most {config.max_model_len}, the model's own limit, got {asked}")
    return asked or config.max_model_len


def resolve_dtype(asked: str, checkpoint: str | None, device: str) -> torch.dtype:
    """The precision to run in; warns where float16 may overflow what bfloat16 could hold."""
    if asked == "auto":
        asked = "float32" if device == "cpu" or checkpoint not in DTYPES else checkpoint
    if asked == "float16" and checkpoint == "bfloat16":
        log.warning("the checkpoint is bfloat16: in float16, values above 65504 overflow and end their request with an error")
    return DTYPES[asked]
