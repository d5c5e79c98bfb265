"""Sampling controls on their way through: checked once, and given the known tokens whenever a row is."""

import msgspec
import numpy as np

from protocol.controls import MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS, MAX_BIASES, RowControls
from protocol.messages import pack, unpack
from protocol.sampling import MAX_END_IDS


def controls_fault(controls: RowControls | None, vocab_size: int) -> str | None:
    """What is wrong with a request's controls: the worker takes every id for a place in its logits, every length as bounded."""
    if controls is None:
        return None
    lists = [controls.bias_ids, controls.allowed_ids, controls.end_ids, *controls.bad_words]
    if any(len(ids) % 4 for ids in lists):
        return "the ids of controls must be packed int32"
    ids = np.concatenate([unpack(ids) for ids in lists])
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        return f"the ids of controls must be between 0 and {vocab_size - 1}"
    if len(controls.bias_ids) != len(controls.bias_values) or len(controls.bias_ids) > 4 * MAX_BIASES:
        return f"controls take at most {MAX_BIASES} biases, as many ids as values"
    if len(controls.end_ids) > 4 * MAX_END_IDS:
        return f"controls take at most {MAX_END_IDS} end ids"
    if len(controls.bad_words) > MAX_BAD_SEQUENCES or not all(4 <= len(ids) <= 4 * MAX_BAD_WORD_TOKENS for ids in controls.bad_words):
        return f"controls take at most {MAX_BAD_SEQUENCES} bad words of 1 to {MAX_BAD_WORD_TOKENS} tokens"
    return None


def controls_for_row(controls: RowControls | None, tokens: np.ndarray) -> RowControls | None:
    """A request's controls for its row, with the tokens known now where they are needed."""
    if controls is None or not controls.needs_tokens:
        return controls
    return msgspec.structs.replace(controls, tokens=pack(tokens))
