"""Mixtures of experts: routing and sums against loops over tokens, configurations, and what a checkpoint must hold."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.reference_experts import choose_experts, expert_mlps
from tests.checkpoints import tiny_checkpoint
from tests.test_models import MOE
from worker.loading import load_model
from worker.model_config import load_model_config, parse_model_config

T, D, I, M, N = 33, 16, 12, 6, 3
ROUTINGS = ["uniform", "skewed", "all_to_the_same"]


def router(kind: str, rng: torch.Generator) -> torch.Tensor:
    """For tokens of positive values: a constant added to an expert's row makes it likelier for all."""
    router_MD = torch.randn(M, D, generator=rng)
    if kind == "skewed":
        router_MD[0] += 0.5
    if kind == "all_to_the_same":
        router_MD = 0.01 * router_MD + torch.linspace(0.3, -0.3, M)[:, None]
    return router_MD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_a_token_gets_the_weighted_sum_of_its_likeliest_experts(kind, normalises, dtype):
    rng = torch.Generator().manual_seed(1)
    x_TD = torch.randn(T, D, generator=rng).abs().to(dtype)
    router_MD = router(kind, rng).to(dtype)
    gate_up_MJD, down_MDI = (torch.randn(M, *shape, generator=rng).to(dtype) for shape in ((2 * I, D), (D, I)))
    weights_TN, experts_TN = choose_experts(x_TD, router_MD, N, normalises)
    assert kind != "all_to_the_same" or set(experts_TN.flatten().tolist()) == {0, 1, 2}
    out_TD = torch.empty_like(x_TD)
    expert_mlps(x_TD, weights_TN, experts_TN, gate_up_MJD, down_MDI, out_TD)
    for token in range(T):
        x_D = x_TD[token].double()
        chances_M = torch.softmax((x_TD[token] @ router_MD.T).double(), dim=0)
        best = sorted(range(M), key=lambda expert: -chances_M[expert])[:N]
        assert sorted(experts_TN[token].tolist()) == sorted(best)
        scale = sum(chances_M[expert] for expert in best) if normalises else 1.0
        expected_D = torch.zeros(D, dtype=torch.float64)
        for expert in best:
            gate_I, up_I = (gate_up_MJD[expert].double() @ x_D).chunk(2)
            expected_D += chances_M[expert] / scale * (down_MDI[expert].double() @ (gate_I * torch.sigmoid(gate_I) * up_I))
        tolerance = 1e-4 if dtype == torch.float32 else 0.05
        assert (out_TD[token].double() - expected_D).norm() <= tolerance * (1 + expected_D.norm())


def test_the_output_may_be_the_input():
    rng = torch.Generator().manual_seed(2)
    x_TD, gate_up_MJD = torch.randn(T, D, generator=rng), torch.randn(M, 2 * I, D, generator=rng)
    down_MDI, chosen = torch.randn(M, D, I, generator=rng), choose_experts(x_TD, router("uniform", rng), N, True)
    apart_TD = torch.empty_like(x_TD)
    expert_mlps(x_TD, *chosen, gate_up_MJD, down_MDI, apart_TD)
    expert_mlps(x_TD, *chosen, gate_up_MJD, down_MDI, x_TD)
    assert torch.equal(x_TD, apart_TD)


def qwen3_moe(**keys: object) -> dict:
    return {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4, "head_dim": 16} | keys


@pytest.mark.parametrize(
    ("keys", "sparse"),
    [
        ({}, {0, 1, 2, 3}), ({"mlp_only_layers": [0, 2]}, {1, 3}), ({"decoder_sparse_step": 2}, {1, 3}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {1}), ({"mlp_only_layers": None}, {0, 1, 2, 3}),
    ],
)  # fmt: skip
def test_which_layers_are_sparse_follows_both_keys(keys, sparse):
    assert parse_model_config(qwen3_moe(**keys)).experts.sparse_layers == sparse


def test_the_number_of_experts_has_two_spellings_and_zero_means_dense():
    assert parse_model_config(qwen3_moe(num_experts=16)).experts.num_experts == 16
    assert parse_model_config(qwen3_moe(num_local_experts=16)).experts.num_experts == 16
    assert parse_model_config(qwen3_moe()).experts.num_experts == 128
    assert parse_model_config(qwen3_moe(num_experts=0)).experts is None
    assert [parse_model_config(qwen3_moe(**keys)).experts.normalises for keys in ({}, {"norm_topk_prob": True})] == [False, True]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"num_experts": 4, "num_experts_per_tok": 5}, r"num_experts_per_tok must be at most num_experts \(4\), got 5"),
        ({"num_experts": 5000}, "num_experts must be between 0 and 4096, got 5000"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be between 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be between 1"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size must be between 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(keys, reason):
    with pytest.raises(ValueError, match=reason):
        parse_model_config(qwen3_moe(**keys))


def test_an_expert_that_is_missing_is_named(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3_moe", **MOE)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="the checkpoint lacks model.layers.1.mlp.experts.5.up_proj.weight"):
        load_model(str(folder), "auto", "cpu", None)


def test_experts_may_lie_in_several_files(tmp_path):
    whole = load_model(str(tiny_checkpoint(tmp_path / "whole", "qwen3_moe", **MOE)), "auto", "cpu", None)
    tensors, folder = load_file(tmp_path / "whole" / "model.safetensors"), tmp_path / "parts"
    folder.mkdir()
    (folder / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    weight_map = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    parts = load_model(str(folder), "auto", "cpu", None)
    for layer, other in zip(whole.weights.layers, parts.weights.layers, strict=True):
        assert torch.equal(layer.experts.gate_up_MJD, other.experts.gate_up_MJD)
        assert torch.equal(layer.experts.down_MDI, other.experts.down_MDI)
    assert load_model_config(folder) == whole.config
