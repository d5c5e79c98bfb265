"""The sampling kernels against the plain torch version.

N = samples, V = vocabulary
"""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.sampling import sample

FILTERS = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (0.8, 0, 1.0, 0.0),
    "top_k 1": (1.0, 1, 1.0, 0.0),
    "top_p 0": (1.0, 0, 0.0, 0.0),
    "top_k": (1.5, 5, 1.0, 0.0),
    "top_k of all": (1.0, 100000, 1.0, 0.0),
    "top_p": (1.3, 0, 0.7, 0.0),
    "top_p of nearly all": (1.0, 0, 0.999999, 0.0),
    "min_p": (2.0, 0, 1.0, 0.2),
    "all": (1.2, 12, 0.8, 0.05),
}


def sample_both(logits_NV: Tensor, filters: list[tuple], sampled_vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    N, device = len(logits_NV), logits_NV.device
    columns = [torch.tensor(column, device=device) for column in zip(*filters)]
    types = (torch.float32, torch.int32, torch.float32, torch.float32)
    columns = [column.to(dtype) for column, dtype in zip(columns, types)]
    seed_N = torch.arange(N, device=device) * 0x123456789 + seed
    position_N = torch.arange(N, dtype=torch.int32, device=device) + 7
    want_N, got_N = (torch.full((N,), -99, dtype=torch.int32, device=device) for _ in range(2))
    before_NV = logits_NV.clone()
    reference.sample(logits_NV, *columns, seed_N, position_N, sampled_vocab, want_N)
    sample(logits_NV, *columns, seed_N, position_N, sampled_vocab, got_N)
    assert torch.equal(logits_NV.nan_to_num(nan=99.0), before_NV.nan_to_num(nan=99.0))
    return got_N, want_N


@pytest.mark.parametrize("V", [130, 331])
def test_every_filter_keeps_what_the_reference_keeps(V, device):
    torch.manual_seed(V)
    logits_NV = (torch.randn(len(FILTERS), V) * 3).to(device)
    for seed in range(3):
        got_N, want_N = sample_both(logits_NV, list(FILTERS.values()), V - 3, seed)
        assert torch.equal(got_N, want_N), dict(zip(FILTERS, zip(got_N.tolist(), want_N.tolist())))


def test_ties_stay_by_lowest_id(device):
    """Logits of four values only: the boundary of every filter lies among equals."""
    torch.manual_seed(1)
    logits_NV = torch.randint(-1, 3, (20, 40)).float().to(device)
    logits_NV[::2] *= -0.0  # all equal, of either sign
    filters = [(1.0, k, p, 0.0) for k in (0, 7) for p in (1.0, 0.25, 0.5, 0.7, 0.05) for _ in range(2)]
    got_N, want_N = sample_both(logits_NV, filters, 40)
    assert torch.equal(got_N, want_N), list(zip(filters, got_N.tolist(), want_N.tolist()))


def test_broken_rows_sample_no_token(device):
    logits_NV = torch.randn(6, 50).to(device)
    logits_NV[0, 33] = torch.nan
    logits_NV[1] = -torch.inf
    logits_NV[2, 4] = torch.inf
    logits_NV[3, :49] = -torch.inf
    logits_NV[4, 49:] = torch.nan  # beyond the sampled vocabulary
    logits_NV[5, 3] = -torch.nan
    for name in ("greedy", "plain", "all"):
        got_N, want_N = sample_both(logits_NV, [FILTERS[name]] * 6, 49)
        assert torch.equal(got_N, want_N)
        assert got_N[:4].tolist() == [reference.NO_TOKEN] * 4 and got_N[4] >= 0 and got_N[5] == reference.NO_TOKEN


@pytest.mark.gpu
def test_real_vocabulary_and_graph(device):
    """The same tokens from a graph, which also shows that the host reads nothing."""
    torch.manual_seed(0)
    N, V = 64, 151936
    logits_NV = torch.randn(N, V, device=device) * 4
    filters = [list(FILTERS.values())[n % len(FILTERS)] for n in range(N)]
    got_N, want_N = sample_both(logits_NV, filters, V - 200)
    # Noise is float32 here and float64 there, weights likewise: a near-tie may fall either way.
    assert (got_N != want_N).sum() <= 1
    columns = [torch.tensor(c, device=device) for c in zip(*filters)]
    arguments = (logits_NV, columns[0], columns[1].int(), columns[2], columns[3], torch.arange(N, device=device) * 0x123456789,
                 torch.arange(N, dtype=torch.int32, device=device) + 7, V - 200)  # fmt: skip
    out_N = torch.zeros(N, dtype=torch.int32, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(*arguments, out_N)
    graph.replay()
    assert torch.equal(out_N, got_N)
