"""What a step does, decided by pure functions."""

import math
from dataclasses import dataclass

import numpy as np

# Decoding rows take what they need of a step's tokens; prompts get the rest, and never less than this share of the budget, so
# that a budget smaller than the batch starves nobody.
LEAST_PROMPT_SHARE = 4

# Blocks granted at once to a decoding row while the pool has room for twice that in every row.
MOST_LEASED = 4

# A round trip between hot processes takes 60 to 170 µs on the H200's host, over 1 ms at the 99.9th percentile.
LATE_S = 1e-3


@dataclass(frozen=True)
class StepPlan:
    """The rows of a step: one token for each of decode_rows, chunk_sizes[i] tokens for chunk_rows[i]."""

    decode_rows: np.ndarray
    chunk_rows: np.ndarray
    chunk_sizes: np.ndarray

    @property
    def is_empty(self) -> bool:
        return len(self.decode_rows) + len(self.chunk_rows) == 0


def plan_step(decode_rows: np.ndarray, prompt_rows: np.ndarray, prompt_tokens: np.ndarray, budget: int) -> StepPlan:
    """Every decoding row first, then chunks of the prompts.

    prompt_rows come oldest first, prompt_tokens[i] of prompt_rows[i] are left to compute; budget is in tokens per step.
    """
    room = max(budget - len(decode_rows), budget // LEAST_PROMPT_SHARE, 1)
    sizes = share_budget(prompt_tokens, room)
    chosen = sizes > 0
    return StepPlan(decode_rows, prompt_rows[chosen], sizes[chosen])


def share_budget(wanted: np.ndarray, room: int) -> np.ndarray:
    """Tokens for each prompt: half the room to the oldest, the rest to the shortest first.

    The half keeps a long prompt moving; shortest first lets a newcomer pass prompts of many steps (and is the order with the
    least mean waiting time, known as SRPT).
    """
    sizes = np.zeros_like(wanted)
    if len(wanted) == 0:
        return sizes
    sizes[0] = min(wanted[0], -(-room // 2))
    left = room - int(sizes[0])
    for i in np.argsort(wanted, kind="stable"):
        if left == 0:
            break
        more = min(int(wanted[i] - sizes[i]), left)
        sizes[i] += more
        left -= more
    return sizes


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold num_tokens."""
    return -(-num_tokens // block_size)


def can_admit(needed_blocks: int, free_blocks: int, num_running: int) -> bool:
    """Whether a request may start: its known tokens and its first own one have blocks, and each running row could still grow
    by one. Without that reserve, a newcomer would be preempted by the next step's growth."""
    return needed_blocks + num_running <= free_blocks or (num_running == 0 and needed_blocks <= free_blocks)


def lease_size(free_blocks: int, num_running: int) -> int:
    """Blocks for a row that needs one: several ahead while the pool is roomy, so that most decode steps grant none."""
    return MOST_LEASED if free_blocks >= 2 * MOST_LEASED * num_running else 1


def swap_is_cheaper(num_blocks: int, num_tokens: int, block_copy_s: float, prompt_token_s: float) -> bool:
    """Whether copying blocks out and in again takes less time than computing their tokens anew. Yes until that is measured: whoever
    gives host memory for it wants it used."""
    return prompt_token_s == 0.0 or 2 * num_blocks * block_copy_s < num_tokens * prompt_token_s


def pipeline_depth(most: int, step_s: float, round_trip_s: float, has_waiting: bool) -> int:
    """Steps to keep in flight, so that the worker has its next one before it ends the last, also when a message is late.

    Each step in flight is one that a newcomer waits for, and one that a stop wastes: two while requests wait, and no more than late
    messages ask for. Before anything is measured, two.
    """
    if has_waiting or step_s == 0.0:
        return min(most, 2)
    return min(most, max(2, 1 + math.ceil((round_trip_s + LATE_S) / step_s)))
