"""Checkpoints on disk: every tensor reaches its place or is named in an error; damaged files say what is wrong with them."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny_checkpoint, tiny_model
from tests.paged_driver import PagedDriver
from worker.loading import load_model
from worker.parameters import by_name

PROMPT = [5, 300, 17, 42, 8]
FIRST_SHARD = "model-00001-of-00002.safetensors"


def load(path, dtype="auto", max_model_len=None):
    return load_model(str(path), dtype, "cpu", max_model_len)


def logits(model):
    return PagedDriver(model, num_rows=1).run({0: PROMPT})


@torch.no_grad()
def expected_logits(**config):
    return tiny_model(**config)(torch.tensor([PROMPT])).logits[0, -1:]


def change_tensors(folder, change):
    """Rewrite model.safetensors after change(tensors)."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def shard(folder):
    """Split model.safetensors into two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {FIRST_SHARD: names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file_name, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file_name)
    weight_map = {name: file_name for file_name, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_with_and_without_their_tensor(tied, with_head, tmp_path):
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=tied)

    def change(tensors):
        tensors.pop("lm_head.weight", None)
        if with_head:
            head = tiny_model(tie_word_embeddings=tied).lm_head.weight.detach()
            tensors["lm_head.weight"] = head if not tied else head * 2  # a tied model must not look at it

    change_tensors(folder, change)
    if tied or with_head:
        torch.testing.assert_close(logits(load(folder)), expected_logits(tie_word_embeddings=tied), rtol=1e-3, atol=1e-3)
    else:
        with pytest.raises(ValueError, match="lacks lm_head.weight"):
            load(folder)


def test_no_second_copy_of_the_weights_is_kept(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen2")
    model = load(folder)
    checkpoint_bytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in by_name(model.weights, model.config).values()}
    assert sum(storages.values()) == checkpoint_bytes


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
    (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), "no place for .*q_proj.bias"),
    (lambda t: t.update({"model.norm.weight": torch.ones(65)}), r"model.norm.weight has shape \[65\].*\[64\]"),
    (
        lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 32)}),
        r"k_proj.weight has shape \[64, 32\].*\[32, 64\]",
    ),
    (lambda t: t.update({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 64)}), "merge the adapters"),
])  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(change, message, tmp_path):
    folder = tiny_checkpoint(tmp_path)
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_rotary_tables_of_old_checkpoints_are_ignored(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    torch.testing.assert_close(logits(load(folder)), expected_logits(), rtol=1e-3, atol=1e-3)


def test_adapters_are_refused(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="merge the adapters"):
        load(folder)


def test_only_what_the_index_names_is_read(tmp_path):
    folder = shard(tiny_checkpoint(tmp_path))
    wrong = {name: tensor + 1 for name, tensor in tiny_model().state_dict().items()}
    save_file(wrong, folder / "consolidated.safetensors")
    save_file(wrong, folder / "a_stray.safetensors")
    (folder / "half_a_download.safetensors").write_bytes(b"\0" * 20)
    first = folder / FIRST_SHARD
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    elsewhere = next(name for name, file_name in weight_map.items() if file_name != FIRST_SHARD)
    save_file(load_file(first) | {"unindexed": torch.ones(2), elsewhere: torch.zeros(64)}, first)
    torch.testing.assert_close(logits(load(folder)), expected_logits(), rtol=1e-3, atol=1e-3)


def test_without_an_index_a_name_in_two_files_is_an_error(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, folder / "other.safetensors")
    with pytest.raises(ValueError, match="both model.safetensors and other.safetensors hold model.norm.weight"):
        load(folder)


def test_several_files_without_an_index_are_read_together(tmp_path):
    folder = shard(tiny_checkpoint(tmp_path))
    (folder / "model.safetensors.index.json").unlink()
    torch.testing.assert_close(logits(load(folder)), expected_logits(), rtol=1e-3, atol=1e-3)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def append(path):
    path.write_bytes(path.read_bytes() + b"trailing")


def replace_by_pointer(path):
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n")


def replace_by_noise(path):
    path.write_bytes(b"<html>404</html>" * 3)


@pytest.mark.parametrize("damage, message", [
    (cut, "cut short"),
    (append, "appended"),
    (replace_by_pointer, "git-lfs pointer"),
    (replace_by_noise, "not a safetensors file"),
    (lambda path: path.write_bytes(b""), "not a safetensors file"),
    (lambda path: path.unlink(), "does not exist"),
])  # fmt: skip
def test_a_damaged_shard_is_named_with_the_probable_reason(damage, message, tmp_path):
    folder = shard(tiny_checkpoint(tmp_path))
    damage(folder / FIRST_SHARD)
    with pytest.raises(ValueError, match=f"{FIRST_SHARD}.*{message}"):
        load(folder)


BROKEN = ['{"weight_map": {}}}', "{}", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": "../x.safetensors"}}', "\xff"]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_index_is_named(text, tmp_path):
    folder = shard(tiny_checkpoint(tmp_path))
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="model.safetensors.index.json"):
        load(folder)


def test_an_index_that_places_a_tensor_wrongly_is_an_error(tmp_path):
    folder = shard(tiny_checkpoint(tmp_path))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = next(name for name, file_name in index["weight_map"].items() if file_name != FIRST_SHARD)
    index["weight_map"][moved] = FIRST_SHARD
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{FIRST_SHARD} does not hold {moved}"):
        load(folder)


@pytest.mark.parametrize("fields, message", [
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported are LlamaForCausalLM, Mistral"),
    ({"architectures": None}, "architectures is missing"),
    ({"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
    ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
    ({"head_dim": None, "num_attention_heads": 7, "num_key_value_heads": 7}, r"hidden_size \(64\) must be a multiple"),
    ({"head_dim": 15}, "head_dim must be even"),
    ({"vocab_size": 0}, "vocab_size must be between 1 and"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*not supported; supported are default, linear"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "yarn needs a factor"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": "four"}}, "rope_parameters.*factor"),
    ({"rope_parameters": {"rope_type": "divisors"}}, "not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
])  # fmt: skip
def test_a_configuration_that_is_not_supported_is_refused_by_name(fields, message, tmp_path):
    folder = tiny_checkpoint(tmp_path)
    change_config(folder, **fields)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        load(folder)


def test_code_that_a_checkpoint_brings_is_not_run(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    change_config(folder, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('run')")
    load(folder)


def test_paths_that_hold_no_model_are_named(tmp_path):
    with pytest.raises(ValueError, match="absent does not exist"):
        load(tmp_path / "absent")
    with pytest.raises(ValueError, match="holds no config.json"):
        load(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="neither a model folder nor a .gguf file"):
        load(tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load(tmp_path)


def test_max_model_len_is_bounded_by_the_model(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    assert load(folder).max_model_len == 512 and load(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(ValueError, match="max_model_len must be at most 512, .*got 513"):
        load(folder, max_model_len=513)


def test_the_run_type_converts_weights_and_warns_of_the_downcast(tmp_path, caplog):
    folder = tmp_path / "bfloat16"
    tiny_model().bfloat16().save_pretrained(folder)
    assert load(folder).dtype == torch.float32
    with caplog.at_level(logging.WARNING):
        assert load(folder, "bfloat16").dtype == torch.bfloat16
        assert not caplog.records
        assert load(folder, "float16").dtype == torch.float16
    assert "overflow" in caplog.text
