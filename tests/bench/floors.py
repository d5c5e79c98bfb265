"""The physical floor of a decode step: the bytes that must move, over the bandwidth of a device-to-device copy."""

import json
from pathlib import Path

COPY_TB_S = 4.28  # one H200, bytes read and written


def floor_ms(model: Path, batch: int, context: int) -> float:
    """Milliseconds for layer weights, head and the KV of `context` tokens of each row, in bfloat16."""
    return sum(step_bytes(json.loads((model / "config.json").read_text()), batch, context)) / COPY_TB_S / 1e9


def step_bytes(c: dict, batch: int, context: int) -> tuple[int, int, int]:
    """Bytes of the layers' weights, of the head, and of keys and values."""
    D, L, H, K = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"]
    F = c.get("head_dim") or D // H
    layer = 2 * D * F * (2 * H + 2 * K) + 2 * 3 * D * c["intermediate_size"]
    return L * layer, 2 * c["vocab_size"] * D, batch * context * L * 2 * K * F * 2
