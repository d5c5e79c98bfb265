"""Log-probabilities of tokens, from logits that nothing has changed yet.

X = scores, V = vocabulary, W = words of a score (see `protocol.logprobs`), C = scores worked on at once, K = best ids
"""

import torch
from torch import Tensor

from protocol.logprobs import MAX_LOGPROBS, NO_ID

AT_ONCE = 64  # as for controls: what they take of the device's memory is measured


def write_scores(logits_XV: Tensor, tokens_X: Tensor, scores_XW: Tensor) -> None:
    """Score one token at each place. A score depends on its own logits alone; that of a negative token means nothing."""
    parts = (tensor.split(AT_ONCE) for tensor in (logits_XV, tokens_X, scores_XW))
    for logits_CV, tokens_C, scores_CW in zip(*parts, strict=True):
        _write_some(logits_CV, tokens_C, scores_CW)


def _write_some(logits_CV: Tensor, tokens_C: Tensor, scores_CW: Tensor) -> None:
    sum_C1 = logits_CV.logsumexp(dim=1, keepdim=True)
    chosen_C1 = logits_CV.gather(1, tokens_C.clamp(min=0).long()[:, None])
    num_best = min(MAX_LOGPROBS, logits_CV.shape[1])
    best_CK, ids_CK = logits_CV.topk(num_best, dim=1)
    values_CW = scores_CW.view(torch.float32)
    scores_CW[:, 0] = (logits_CV > chosen_C1).sum(dim=1) + 1
    values_CW[:, 1:2] = chosen_C1 - sum_C1
    scores_CW[:, 2:].fill_(NO_ID)
    scores_CW[:, 2 : 2 + num_best] = ids_CK
    values_CW[:, 2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + num_best] = best_CK - sum_C1
