"""From a path to a model that is ready to allocate its cache."""

import logging
from pathlib import Path

import torch

from kernels import reference
from worker.gguf_weights import GgufFile
from worker.model import TransformerModel
from worker.model_config import ModelConfig, load_model_config
from worker.parameters import allocate_weights, by_name, weight_bytes
from worker.weights import SafetensorsFolder, TensorSource, load_weights

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(path: str, dtype: str, device: str, max_model_len: int | None) -> TransformerModel:
    """Load a safetensors folder or a .gguf file.

    dtype "auto" is float32 on a CPU and the checkpoint's own on a GPU; device "auto" is the GPU where there is one. max_model_len
    None takes the model's limit. Raises ValueError for what the user can mend: path, configuration, weights, limits.
    """
    source, config = open_checkpoint(Path(path))
    limit = resolve_max_model_len(config, max_model_len)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    run_dtype = resolve_dtype(dtype, config.dtype, device)
    weights = allocate_weights(config, run_dtype, device)
    load_weights(source, by_name(weights, config), ignored=["lm_head.weight"] if config.tie_word_embeddings else [])
    log.info("loaded %s: %s, %.2f GiB in %s", path, config.architecture, weight_bytes(weights, config) / 2**30, run_dtype)
    return TransformerModel(config, weights, reference, limit)


def open_checkpoint(path: Path) -> tuple[TensorSource, ModelConfig]:
    """A checkpoint's tensors and configuration. Raises ValueError."""
    if path.is_dir():
        config = load_model_config(path)
        return SafetensorsFolder(path), config
    if path.is_file() and path.suffix == ".gguf":
        file = GgufFile(path)
        return file, file.config
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
