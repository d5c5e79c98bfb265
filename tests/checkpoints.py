"""Tiny random checkpoints, written by transformers: varied greedy continuations, wide gaps between the best two logits."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

ARCHITECTURES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_model(arch: str = "llama", seed: int = 0, **overrides) -> PreTrainedModel:
    """A float32 model of transformers with random weights, biases and norms; `overrides` go into its config."""
    config_class, model_class = ARCHITECTURES[arch]
    config = config_class(**SHAPE | overrides, attn_implementation="eager")
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts biases at 0 and norms at 1, where a forgotten one would not show
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def tiny_checkpoint(folder: Path, arch: str = "llama", seed: int = 0, **overrides) -> Path:
    """Write tiny_model into folder as safetensors and config.json; returns the folder."""
    tiny_model(arch, seed, **overrides).save_pretrained(folder)
    return Path(folder)
