"""The row-state ops in plain torch: what a step reads from the rows before the model runs, and writes back after it.

T tokens, S sequences, N samples, R rows (the last one is scratch: padding points at it), B blocks per row. Index tensors are int32.
"""

import torch
from torch import Tensor


def gather_rows(
    rows_T: Tensor,
    known_tokens_T: Tensor,
    offsets_T: Tensor,
    last_token_R: Tensor,
    length_R: Tensor,
    prompt_len_R: Tensor,
    block_table_RB: Tensor,
    block_size: int,
    token_ids_T: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    prompt_lens_T: Tensor,
) -> None:
    """Write each token's id, position, KV slot and its request's prompt length (the last four arguments).

    Token t is the offsets_T[t]-th new one of row rows_T[t]. Its id is known_tokens_T[t], or where that is negative the row's last
    sampled token, which the host may not know yet. Tokens of the scratch row get position 0 and slot -1.
    """
    scratch = len(length_R) - 1
    is_padding_T = rows_T == scratch
    torch.where(known_tokens_T < 0, last_token_R[rows_T], known_tokens_T, out=token_ids_T)
    torch.add(length_R[rows_T], offsets_T, out=positions_T)
    positions_T.masked_fill_(is_padding_T, 0)
    blocks_T = block_table_RB[rows_T, positions_T // block_size]
    torch.add(blocks_T * block_size, positions_T % block_size, out=slots_T)
    slots_T.masked_fill_(is_padding_T, -1)
    torch.index_select(prompt_len_R, 0, rows_T, out=prompt_lens_T)


def gather_contexts(rows_S: Tensor, counts_S: Tensor, length_R: Tensor, context_lens_S: Tensor) -> None:
    """Write each sequence's length once its counts_S new tokens are in: 0 for padding, which has no new token."""
    torch.add(length_R[rows_S], counts_S, out=context_lens_S)


def advance_rows(
    rows_S: Tensor, context_lens_S: Tensor, sample_rows_N: Tensor, sampled_N: Tensor, length_R: Tensor, last_token_R: Tensor
) -> None:
    """Write lengths and sampled tokens back into the rows. The scratch row keeps length 0 and some valid id."""
    length_R[rows_S] = context_lens_S
    last_token_R[sample_rows_N] = sampled_N.clamp(min=0)  # a broken row samples NO_TOKEN, which has no embedding
