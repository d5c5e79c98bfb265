"""The fused head against the composition of reference ops, and its packed choice against the reference sampler."""

import pytest
import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.candidates import head_candidates
from kernels.head import Head, gumbel_noise, head_sample
from kernels.matvec import MatvecConfig
from kernels.reference_fused import NOTHING, Chance
from kernels.reference_fused import head_sample as reference_head_sample
from kernels.skinny import SkinnyConfig

ROWS = MatvecConfig(8, 4, 256)
TILES = SkinnyConfig(16, 32, warps=4, stages=2)
BATCHES = SkinnyConfig(16, 64, early=1, rows=16)
ALL_ROWS = 64  # of the row state


def unpack(best_B):
    """Token ids, NO_TOKEN where the winner is not finite."""
    ordered_B = best_B >> 32
    finite_B = (ordered_B < 0x7F800000) & (ordered_B > (0xFF800000 - (1 << 32) ^ 0x7FFFFFFF))
    return torch.where(finite_B, 0x7FFFFFFF - (best_B & 0x7FFFFFFF), reference.NO_TOKEN).int()


def values_of(best_B):
    ordered_B = (best_B >> 32).int()
    return torch.where(ordered_B < 0, ordered_B ^ 0x7FFFFFFF, ordered_B).view(torch.float32)


def make(B, V, D, dtype, device, seed=0):
    g = torch.Generator(device).manual_seed(seed)
    normed_BD = torch.randn(B, D, generator=g, device=device, dtype=dtype)
    return normed_BD, torch.randn(V, D, generator=g, device=device, dtype=dtype).mul_(4 * D**-0.5)


def make_chance(B, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows_B = torch.randperm(ALL_ROWS, generator=g)[:B].int()
    temperature_R = torch.rand(ALL_ROWS + 1, generator=g) + 0.5
    temperature_R[rows_B[::3].long()] = 0
    seed_R = torch.randint(-(2**63), 2**63 - 1, (ALL_ROWS + 1,), generator=g)
    length_R = torch.randint(0, 5000, (ALL_ROWS + 1,), generator=g).int()
    return Chance(*(t.to(device) for t in (rows_B, temperature_R, seed_R, length_R)))


def run(config, tensors, sampled_vocab, chance=None):
    normed_BD, head_VD = tensors
    head = Head(len(head_VD), normed_BD.shape[1], len(normed_BD), normed_BD.dtype, sampled_vocab, chance is not None)
    best_B = torch.full((len(normed_BD),), NOTHING, device=normed_BD.device)
    head_sample(config, head, normed_BD, head_VD, best_B, chance, pdl=False)
    return best_B


@pytest.mark.parametrize(("config", "B"), [(ROWS, 1), (ROWS, 3), (TILES, 5), (TILES, 17), (BATCHES, 20)])
@pytest.mark.parametrize("with_chance", [False, True])
def test_the_choice_is_that_of_the_reference_sampler(config, B, with_chance, device):
    tensors, V = make(B, 75, 128, torch.float32, device, seed=B), 75
    chance = make_chance(B, device) if with_chance else None
    best_B = run(config, tensors, V - 4, chance)
    logits_BV = torch.empty(B, V, device=device)
    reference.linear(*tensors, None, logits_BV)
    ones_B, zeros_B = torch.ones(B, device=device), torch.zeros(B, device=device)
    want_B = zeros_B.int()
    rows_B = chance.rows_B.long() if chance else zeros_B.long()
    temperature_B = chance.temperature_R[rows_B] if chance else zeros_B
    seed_B, position_B = (chance.seed_R[rows_B], chance.length_R[rows_B] + 1) if chance else (zeros_B.long(), zeros_B.int())
    reference.sample(logits_BV, temperature_B, zeros_B.int(), ones_B, zeros_B, seed_B, position_B, V - 4, want_B)
    assert unpack(best_B).tolist() == want_B.tolist()


@pytest.mark.parametrize("config", [ROWS, TILES])
def test_the_packed_value_is_the_references(config, device):
    tensors, chance = make(6, 75, 128, torch.float32, device), make_chance(6, device)
    want_B = torch.full((6,), NOTHING, device=device)
    reference_head_sample(*tensors, 75, want_B, chance)
    best_B = run(config, tensors, 75, chance)
    assert (best_B & 0xFFFFFFFF).tolist() == (want_B & 0xFFFFFFFF).tolist()
    assert torch.allclose(values_of(best_B), values_of(want_B), rtol=1e-5, atol=1e-5)


@triton.jit
def _store_noise(seed_C, position_C, out_CV, V: tl.constexpr):
    ids = tl.arange(0, V)
    c = tl.program_id(0)
    tl.store(out_CV + c * V + ids, gumbel_noise(tl.load(seed_C + c), tl.load(position_C + c), ids))


def test_the_noise_is_that_of_the_reference(device):
    seed_C = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF], device=device)
    position_C = torch.tensor([0, 1, 2**31 - 1, 77, 4096, 131072], dtype=torch.int32, device=device)
    got_CV = torch.empty(6, 64, device=device)
    _store_noise[(6,)](seed_C, position_C, got_CV, V=64)
    quads = torch.arange(16, device=device).repeat(6)
    want_CV = reference.gumbel_noise(seed_C.repeat_interleave(16), position_C.repeat_interleave(16), quads).view(6, 64)
    assert torch.allclose(got_CV, want_CV, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [ROWS, TILES])
def test_the_lowest_id_wins_among_equals_and_zero_equals_minus_zero(config, device):
    normed_BD, head_VD = make(2, 40, 64, torch.float32, device)
    head_VD[:] = head_VD[7].clone()
    assert unpack(run(config, (normed_BD, head_VD), 40)).tolist() == [0, 0]
    normed_BD[:], head_VD[:] = 0, 0
    normed_BD[:, 1], head_VD[0, 1] = 1e-10, -1e-38  # their product is too small for float32
    assert unpack(run(config, (normed_BD, head_VD), 40)).tolist() == [0, 0]


@pytest.mark.parametrize("config", [ROWS, TILES])
@pytest.mark.parametrize("nan", [0x7FC00000, 0xFFC00000 - (1 << 32)], ids=["positive", "negative"])
def test_a_row_with_a_nan_has_no_token_and_spares_the_others(config, nan, device):
    normed_BD, head_VD = make(3, 40, 64, torch.float32, device)
    want = unpack(run(config, (normed_BD, head_VD), 40)).tolist()
    normed_BD[1, 5] = torch.tensor(nan, dtype=torch.int32, device=device).view(torch.float32)
    assert unpack(run(config, (normed_BD, head_VD), 40)).tolist() == [want[0], reference.NO_TOKEN, want[2]]


def test_a_nan_among_the_ids_that_count_wins_and_elsewhere_does_not_matter(device):
    normed_BD, head_VD = make(2, 40, 64, torch.float32, device)
    head_VD[39] = float("nan")
    for config in (ROWS, TILES):
        assert unpack(run(config, (normed_BD, head_VD), 40)).tolist() == [reference.NO_TOKEN] * 2
        assert reference.NO_TOKEN not in unpack(run(config, (normed_BD, head_VD), 39)).tolist()


def test_best_is_raised_never_lowered(device):
    tensors = make(2, 40, 64, torch.float32, device)
    normed_BD, head_VD = tensors
    best_B = torch.full((2,), (0x7F000000 << 32) | 5, device=device)
    head = Head(40, 64, 2, torch.float32, 40, False)
    head_sample(ROWS, head, normed_BD, head_VD, best_B, None, pdl=False)
    assert best_B.tolist() == [(0x7F000000 << 32) | 5] * 2


BF16_SHAPES = {"qwen3-0.6b": (151936, 1024), "llama-3.2-1b": (128256, 2048), "qwen3-8b": (151936, 4096)}
REFERENCE_ROWS = 32  # at a time: the noise of 256 rows takes gigabytes


def highest(tensors, sampled_vocab, chance):
    """What the reference finds from float32 products."""
    normed_BD, wide_VD = tensors[0].float(), tensors[1].float()
    best_B = torch.full((len(normed_BD),), NOTHING, device=normed_BD.device)
    for start in range(0, len(normed_BD), REFERENCE_ROWS):
        part = slice(start, start + REFERENCE_ROWS)
        chance_of_part = chance and chance._replace(rows_B=chance.rows_B[part])
        reference_head_sample(normed_BD[part], wide_VD, sampled_vocab, best_B[part], chance_of_part)
    return best_B


def real_heads():
    """Every kind of configuration on every shape, with and without chance; for one shape and each kind of step all of them."""
    for name, (V, D) in BF16_SHAPES.items():
        for B in (1, 16, 256) if name == "qwen3-8b" else (1, 4, 16, 24, 256):
            found = head_candidates(Head(V, D, B, torch.bfloat16, V - 267, False))
            firsts = list({type(config): config for config in reversed(found)}.values())
            yield pytest.param(name, B, True, firsts, id=f"{name}-{B}-chance")
            yield pytest.param(name, B, False, found if name == "qwen3-0.6b" and B in (4, 24) else firsts, id=f"{name}-{B}")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "B", "with_chance", "configs"), real_heads())
def test_a_highest_token_is_chosen_on_real_shapes(name, B, with_chance, configs, device):
    V, D = BF16_SHAPES[name]
    tensors, chance = make(B, V, D, torch.bfloat16, device), None
    if with_chance:
        chance = make_chance(min(B, ALL_ROWS), device)
        if B > ALL_ROWS:  # several rows of the step may be one row of the state
            chance = chance._replace(rows_B=chance.rows_B.repeat(B // ALL_ROWS))
    want_B = highest(tensors, V - 267, chance)
    for config in configs:
        best_B = run(config, tensors, V - 267, chance)
        tokens_B = unpack(best_B)
        assert ((tokens_B >= 0) & (tokens_B < V - 267)).all(), config
        # Rounding may choose another of nearly equal tokens, never a lower one.
        assert torch.allclose(values_of(best_B), values_of(want_B), rtol=2e-2, atol=5e-2), config
        assert (tokens_B == unpack(want_B)).float().mean() >= (0.9 if B >= 16 else 0), config
