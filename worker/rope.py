"""Rotary position embedding: cosines and sines of a step's tokens, for every supported way of stretching the context.

T = tokens of a step, F = head width, P = F / 2 pairs
"""

import math

import msgspec
import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class RopeConfig(msgspec.Struct, frozen=True):
    """The rotary parameters of a model, whichever way its files spell them."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0  # the context that the model was trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    attention_factor: float | None = None  # yarn, and what follows
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()  # of the frequencies, one a pair: how GGUF files store llama3's scaling


class Rope:
    """Computes cosines and sines. Nothing is tabulated: a step's few thousand cost less than a table of a long context."""

    def __init__(self, config: RopeConfig, head_dim: int, device: str):
        self.config = config
        self.head_dim = head_dim
        self.inv_freq_P = inverse_frequencies(config, head_dim).to(device)
        self.scale = attention_scale(config)

    def cos_sin(self, positions_T: Tensor, prompt_lens_T: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> None:
        """Write the float32 cosines and sines of tokens at `positions`, each of a request whose prompt has `prompt_lens` tokens."""
        inv_freq_TP = self.inv_freq_P
        if self.config.rope_type == "dynamic":
            inv_freq_TP = dynamic_frequencies(self.config, self.head_dim, torch.maximum(prompt_lens_T, positions_T + 1))
        angle_TP = positions_T[:, None] * inv_freq_TP
        torch.mul(angle_TP.cos().repeat(1, 2), self.scale, out=cos_TF)
        torch.mul(angle_TP.sin().repeat(1, 2), self.scale, out=sin_TF)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """The angle per position of each pair, float32 [P]; for "dynamic" those of short sequences."""
    default_P = 1.0 / config.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if config.divisors:
        return default_P / torch.tensor(config.divisors)
    match config.rope_type:
        case "linear":  # position interpolation, https://arxiv.org/abs/2306.15595
            return default_P / config.factor
        case "llama3":
            return _llama3(config, default_P)
        case "yarn":
            return _yarn(config, default_P, head_dim)
        case _:
            return default_P


def dynamic_frequencies(config: RopeConfig, head_dim: int, seq_lens_T: Tensor) -> Tensor:
    """The angles per position, [T, P], of tokens that belong to sequences of these lengths: "dynamic NTK" scaling.

    A sequence longer than the trained context raises the base. Every token takes the length its request had when it was computed
    alone and at once: the prompt's for a prompt token, its own position + 1 for a generated one. So keys in the cache do not
    depend on chunks, batches and preemptions, and equal those of transformers' generate.
    """
    original = config.original_max_position
    stretch_T = config.factor * seq_lens_T.clamp(min=original).double() / original - (config.factor - 1)
    base_T = config.theta * stretch_T ** (head_dim / (head_dim - 2))
    exponent_P = torch.arange(0, head_dim, 2, device=seq_lens_T.device).double() / head_dim
    return (base_T[:, None] ** -exponent_P).float()


def attention_scale(config: RopeConfig) -> float:
    """The factor on cosines and sines: YaRN's attention temperature, 1 for the other types."""
    if config.rope_type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _yarn_temperature(config.factor, config.mscale) / _yarn_temperature(config.factor, config.mscale_all_dim)
    return _yarn_temperature(config.factor, 1.0)


def _yarn_temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(config: RopeConfig, default_P: Tensor) -> Tensor:
    """Llama 3.1: low frequencies are divided by the factor, high ones kept; those between are blended by their turns."""
    turns_P = config.original_max_position * default_P / (2 * math.pi)
    keep_P = ((turns_P - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)
    return torch.lerp(default_P / config.factor, default_P, keep_P)


def _yarn(config: RopeConfig, default_P: Tensor, head_dim: int) -> Tensor:
    """https://arxiv.org/abs/2309.00071: pairs that turn often are kept, slow ones interpolated, a ramp over the pairs between."""
    low, high = (_pair_of_turns(config, head_dim, turns) for turns in (config.beta_fast, config.beta_slow))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # a step instead of a ramp
    ramp_P = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    return torch.lerp(default_P, default_P / config.factor, ramp_P)


def _pair_of_turns(config: RopeConfig, head_dim: int, turns: float) -> float:
    """The index, as a real number, of the pair that turns so many times over the trained context."""
    return head_dim * math.log(config.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(config.theta))
