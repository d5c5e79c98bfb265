"""The projections of a decode step, every configuration kind, against the reference compositions; norm and activation alone."""

import pytest
import torch

from kernels import activation, norm, reference, reference_fused
from kernels.candidates import candidates
from kernels.device import INTERPRETED
from kernels.library import LibraryConfig
from kernels.matvec import MatvecConfig
from kernels.projection import Op, Operands, Projection, allocate_scratch
from kernels.skinny import SkinnyConfig
from kernels.sliced import SlicedConfig

EPS = 1e-6
# The interpreter truncates to bfloat16 where the GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2 if INTERPRETED else 1e-2}
REAL_SHAPES = {  # D, heads * F, (heads + 2 * KV heads) * F, I
    "qwen3-0.6b": (1024, 2048, 4096, 3072),
    "llama-3.2-1b": (2048, 2048, 3072, 8192),
    "qwen3-8b": (4096, 4096, 6144, 12288),
}


def make(p, device, seed=0):
    """Random operands of a projection; its output is NaN where it is only written."""
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g, device=device) * scale).to(p.dtype)

    W = p.halves * p.outputs
    out_BO = randn(p.rows, p.outputs)
    if p.op is not Op.LINEAR_ADD:
        out_BO.fill_(torch.nan)
    bias_W = randn(W) if p.has_bias else None
    return Operands(randn(p.rows, p.inputs, scale=3.0), randn(W, p.inputs, scale=p.inputs**-0.5), bias_W, out_BO)


def expected(p, operands):
    """What the reference computes with float64 products."""
    x_BK, weight_WK, bias_W, out_BO = (None if t is None else t.double() for t in operands)
    match p.op:
        case Op.NORM_LINEAR:
            reference_fused.norm_linear(x_BK, weight_WK, bias_W, out_BO, p.eps)
        case Op.LINEAR_ADD:
            reference_fused.linear_add(x_BK, weight_WK, bias_W, out_BO)
        case Op.NORM_GATE_UP:
            reference_fused.norm_gate_up(x_BK, weight_WK, bias_W, out_BO, p.eps)
    return out_BO


def poisoned_scratch(config, p, device):
    scratch = allocate_scratch([config.scratch_sizes(p)], p.dtype, device)
    for buffer in (scratch.partial, scratch.normed, scratch.products):
        buffer.fill_(torch.nan)
    return scratch


def outcome(config, p, operands, pdl=False):
    """The output of one run; the operands stay as they are."""
    assert config.fits(p), config
    out_BO, scratch = operands.out_BO.clone(), poisoned_scratch(config, p, operands.x_BK.device)
    config.run(p, operands._replace(out_BO=out_BO), scratch, pdl)
    assert not scratch.arrived.any(), config
    return out_BO


def check(config, p, device):
    operands = make(p, device)
    want_BO = expected(p, operands)
    error = (outcome(config, p, operands).double() - want_BO).norm() / want_BO.norm()
    assert error < TOLERANCE[p.dtype], error


CONFIGURATIONS = [
    (MatvecConfig(8, 4, 256), 1, 40, 256),
    (MatvecConfig(8, 8, 1024), 3, 19, 576),  # neither outputs nor inputs are whole tiles
    (MatvecConfig(4, 4, 128), 8, 8, 336),  # several steps, the last one not whole
    (SkinnyConfig(16, 32, warps=4, stages=2), 5, 35, 96),
    (SkinnyConfig(32, 32, splits=2, early=1), 17, 64, 192),
    (SkinnyConfig(16, 32, splits=2, early=1, norm_apart=True), 33, 40, 128),
    (SkinnyConfig(16, 16, splits=4, early=2, rows=16), 40, 24, 128),  # all loaded early; three batches of rows
    (LibraryConfig(), 19, 40, 96),
    (SlicedConfig(16, 4, 32), 5, 40, 128),
    (SlicedConfig(8, 2, 32), 17, 24, 192),  # several steps
    (SlicedConfig(16, 4, 64), 32, 35, 256),
]


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize(("config", "B", "O", "K"), CONFIGURATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_projection_is_that_of_the_reference(op, config, B, O, K, has_bias, device):
    check(config, Projection(op, O, K, B, torch.float32, has_bias, EPS), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize(("config", "B", "O", "K"), CONFIGURATIONS[1:5:2] + CONFIGURATIONS[6:])
def test_half_precision_rounds_no_more_than_it_must(dtype, op, config, B, O, K, device):
    check(config, Projection(op, O, K, B, dtype, True, EPS), device)


@pytest.mark.parametrize("config", [MatvecConfig(8, 4, 256), SkinnyConfig(16, 32, splits=2), SlicedConfig(16, 4, 32)])
def test_a_residual_stream_near_the_limit_of_float16_is_normalised(config, device):
    p = Projection(Op.NORM_LINEAR, 16, 128, 4, torch.float16, eps=EPS)
    operands = make(p, device)
    operands.x_BK.mul_(4000)
    operands.weight_WK.mul_(100)  # the products do not fit float16, and neither do the squares
    assert operands.x_BK.isfinite().all() and (operands.x_BK @ operands.weight_WK.T).isinf().any()
    want_BO = expected(p, operands)
    config.run(p, operands, poisoned_scratch(config, p, device), pdl=False)
    assert (operands.out_BO.double() - want_BO).norm() / want_BO.norm() < TOLERANCE[torch.float16]


def test_scratch_is_left_ready_for_the_next_projection(device):
    config = SkinnyConfig(16, 32, splits=4)
    small, large = (Projection(Op.NORM_GATE_UP, O, 128, 5, torch.float32, eps=EPS) for O in (16, 48))
    scratch = allocate_scratch([config.scratch_sizes(small), config.scratch_sizes(large)], torch.float32, device)
    for p in (large, small, large):
        operands = make(p, device)
        want_BO = expected(p, operands)
        config.run(p, operands, scratch, pdl=False)
        assert torch.allclose(operands.out_BO.double(), want_BO, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("B", [1, 3, 8, 16, 24, 256])
@pytest.mark.parametrize(("O", "K"), [(576, 576), (960, 1536), (1024, 1040), (49152, 8192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_shape_has_candidates_that_fit(op, B, O, K, dtype):
    p = Projection(op, O, K, B, dtype)
    found = candidates(p)
    assert found and all(config.fits(p) for config in found)
    assert B <= 8 or any(isinstance(config, SkinnyConfig) for config in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_the_reference(dtype, device):
    x_TD, residual_TD = (torch.randn(5, 80, device=device).to(dtype) for _ in range(2))
    weight_D = (1 + 0.1 * torch.randn(80, device=device)).to(dtype)
    want_TD, got_TD, want_residual_TD, got_residual_TD = x_TD.clone(), x_TD.clone(), residual_TD.clone(), residual_TD.clone()
    reference.add_rms_norm(x_TD, want_residual_TD, weight_D, want_TD, EPS)
    norm.add_rms_norm(got_TD, got_residual_TD, weight_D, got_TD, EPS)
    assert torch.allclose(got_TD.float(), want_TD.float(), rtol=4 * TOLERANCE[dtype], atol=1e-6)
    assert torch.allclose(got_residual_TD.float(), want_residual_TD.float(), rtol=TOLERANCE[dtype])
    heads_THF = torch.randn(3, 6, 32, device=device).to(dtype)
    want_THF, out_THF = heads_THF[:, :4].clone(), torch.full_like(heads_THF, torch.nan)
    reference.rms_norm(want_THF, weight_D[:32], want_THF, EPS)
    norm.rms_norm(heads_THF[:, :4], weight_D[:32], out_THF[:, 1:5], EPS)
    assert torch.allclose(out_THF[:, 1:5].float(), want_THF.float(), rtol=4 * TOLERANCE[dtype], atol=1e-6)
    assert out_THF[:, [0, 5]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_is_that_of_the_reference(dtype, device):
    gate_up_T2I = (torch.randn(3, 2 * 1100, device=device) * 3).to(dtype)
    got_TI, want_TI = (torch.full((3, 1100), torch.nan, dtype=dtype, device=device) for _ in range(2))
    reference.silu_mul(gate_up_T2I, want_TI)
    activation.silu_mul(gate_up_T2I, got_TI)
    assert torch.allclose(got_TI.float(), want_TI.float(), rtol=2 * TOLERANCE[dtype], atol=1e-6)


def real_projections():
    """The products of real models' layers, by name."""
    for name, (D, X, E, I) in REAL_SHAPES.items():
        parts = {"qkv": (Op.NORM_LINEAR, E, D), "out": (Op.LINEAR_ADD, D, X)}
        parts |= {"gate_up": (Op.NORM_GATE_UP, I, D), "down": (Op.LINEAR_ADD, D, I)}
        for B in (1, 16, 256) if name == "qwen3-8b" else (1, 4, 16, 24, 64, 256):
            for part, (op, O, K) in parts.items():
                yield f"{name}-{part}-{B}", Projection(op, O, K, B, torch.bfloat16, eps=EPS)


def real_cases():
    """Every kind of configuration on every product, and two more that had no turn yet: each takes seconds to compile."""
    seen = set()
    for name, p in real_projections():
        found = candidates(p)
        firsts = list({type(config): config for config in reversed(found)}.values())
        configs = firsts + [config for config in found if config not in seen and config not in firsts][:2]
        seen.update(configs)
        yield pytest.param(p, configs, id=name)


def test_every_candidate_has_its_turn_on_a_real_shape():
    turns = {config for case in real_cases() for config in case.values[1]}
    assert turns == {config for _, p in real_projections() for config in candidates(p)}


@pytest.mark.gpu
@pytest.mark.parametrize(("p", "configs"), real_cases())
def test_a_product_of_a_real_shape_is_right_and_repeats_its_bits(p, configs, device):
    operands = make(p, device)
    want_BO = expected(p, operands)
    for config in configs:
        first_BO, second_BO = (outcome(config, p, operands, pdl=True) for _ in range(2))
        error = (first_BO.double() - want_BO).norm() / want_BO.norm()
        assert error < TOLERANCE[p.dtype], (config, error)
        assert torch.equal(first_BO, second_BO), config


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 4, 16, 64])
def test_a_dependent_chain_gives_the_bits_of_a_serial_one(B, device):
    D, X, E, I = REAL_SHAPES["qwen3-0.6b"]
    gate_up = Projection(Op.NORM_GATE_UP, I, D, B, torch.bfloat16, eps=EPS)
    down = Projection(Op.LINEAR_ADD, D, I, B, torch.bfloat16)
    configs = [next(c for c in candidates(p) if not isinstance(c, LibraryConfig)) for p in (gate_up, down)]
    scratch = allocate_scratch([configs[0].scratch_sizes(gate_up), configs[1].scratch_sizes(down)], torch.bfloat16, device)
    up_weights, down_weights = make(gate_up, device), make(down, device, seed=1)
    start_BD, outcomes = up_weights.x_BK.clone(), []
    for pdl in (False, True):
        x_BD, inner_BI = start_BD.clone(), torch.full((B, I), torch.nan, dtype=torch.bfloat16, device=device)
        for _ in range(300):
            configs[0].run(gate_up, up_weights._replace(x_BK=x_BD, out_BO=inner_BI), scratch, pdl)
            configs[1].run(down, down_weights._replace(x_BK=inner_BI, out_BO=x_BD), scratch, pdl)
        outcomes.append(x_BD)
    assert outcomes[0].isfinite().all() and torch.equal(*outcomes)
