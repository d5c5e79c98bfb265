"""Model files that are damaged, odd or hostile: one ValueError that names the file, at once, and nothing else."""

import json
import random
import struct
import time

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from frontend.tokenizer import ModelTokenizer, load_tokenizer
from protocol.config import EngineConfig
from protocol.gguf_header import MAX_ARRAY_ITEMS, read_header
from tests import tiny_tokenizers
from tests.checkpoints import tiny_checkpoint, tiny_model
from tests.test_frontend_tokenizer import make_folder
from tests.test_gguf import F32, write_gguf
from tests.test_weights import change_config
from worker.loading import load_model

SECONDS = 2.0  # for any one file; most take a hundredth


def load_all(path):
    """What the worker and the frontend do with a model."""
    config = EngineConfig(model=str(path), served_model_name="m", run_dir="", client_address="", epoch=1)
    load_model(str(path), "auto", "cpu", None)
    return load_tokenizer(config)


def assert_refused_or_loaded(path) -> bool:
    """True when refused."""
    started = time.monotonic()
    try:
        load_all(path)
        refused = False
    except ValueError as error:
        assert str(path) in str(error)
        refused = True
    assert time.monotonic() - started < SECONDS
    return refused


def add_tokenizer(writer):
    tokenizer = tiny_tokenizers.byte_level()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([text for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])][:64])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 61)
    writer.add_token_merges([])
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory):
    model = tiny_model(vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    write_gguf(path, "llama", model, F32, rope=add_tokenizer)
    load_all(path)
    return path.read_bytes()


def mutated(whole: bytes, rng: random.Random, header_size: int) -> bytes:
    content, at = bytearray(whole), rng.randrange(4, header_size)
    match rng.randrange(4):
        case 0:
            content[at] ^= 1 << rng.randrange(8)
        case 1:
            content[at : at + 8] = rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
        case 2:
            del content[at : at + rng.randrange(1, 20)]
        case 3:
            content[at:at] = rng.randbytes(8)
    return bytes(content)


def test_mutated_gguf_files_are_refused_at_once(whole_gguf, tmp_path):
    rng, path = random.Random(3), tmp_path / "mutated.gguf"
    header_size = whole_gguf.index(b"output_norm")
    num_refused = 0
    for _ in range(300):
        path.unlink(missing_ok=True)  # the last one may still be mapped
        path.write_bytes(mutated(whole_gguf, rng, header_size))
        num_refused += assert_refused_or_loaded(path)
    assert num_refused > 150


def test_an_array_longer_than_any_file_is_refused_at_once(whole_gguf, tmp_path):
    path = tmp_path / "long.gguf"
    key = b"tokenizer.ggml.token_type"
    at = whole_gguf.index(key) + len(key) + 8
    path.write_bytes(whole_gguf[:at] + struct.pack("<Q", 2**40) + whole_gguf[at + 8 :])
    with pytest.raises(ValueError, match=f"an array of {2**40} items, where {MAX_ARRAY_ITEMS} is the most"):
        read_header(path)
    assert assert_refused_or_loaded(path)


@pytest.mark.parametrize("merges, said", [(["! !"], "'!' and '!', which are no tokens or make none"), (["alone"], "'alone'")])
def test_merges_that_make_no_token_are_named(merges, said, tmp_path):
    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["!", "#"])
        writer.add_token_merges(merges)

    path = write_gguf(tmp_path / "model.gguf", "llama", tiny_model(), F32, rope=add)
    with pytest.raises(ValueError, match=f"model.gguf: tokenizer.ggml.merges joins {said}"):
        load_all(path)


@pytest.mark.parametrize("file, fields, said", [
    ("config.json", {"eos_token_id": "x"}, "eos_token_id"),
    ("config.json", {"eos_token_id": {}}, "eos_token_id"),
    ("generation_config.json", {"eos_token_id": [[1]]}, "eos_token_id"),
    ("generation_config.json", {"eos_token_id": -1}, ">= 0.*eos_token_id"),
    ("generation_config.json", {"eos_token_id": 10**12}, "eos_token_id"),
    ("generation_config.json", {"eos_token_id": list(range(40))}, "length <= 12.*eos_token_id"),
    ("tokenizer_config.json", {"bos_token": 5}, "bos_token"),
    ("tokenizer_config.json", {"eos_token": {"text": "</s>"}}, "content.*eos_token"),
    ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template"),
    ("tokenizer_config.json", {"chat_template": ["x"]}, "chat_template"),
    ("tokenizer_config.json", {"chat_template": "{% if %}"}, "chat template is damaged"),
])  # fmt: skip
def test_settings_of_the_wrong_type_are_named(file, fields, said, tmp_path):
    folder = make_folder(tmp_path, tiny_tokenizers.byte_level(), **{file.removesuffix(".json"): fields})
    config = EngineConfig(model=str(folder), served_model_name="m", run_dir="", client_address="", epoch=1)
    with pytest.raises(ValueError, match=f"{folder}.*{said}"):
        load_tokenizer(config)


NESTED = b'{"a":' * 100_000


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"{", NESTED, b"version https://git-lfs.github.com/spec/v1\n"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_files_that_hold_something_else_are_named(name, content, tmp_path):
    folder = make_folder(tmp_path, tiny_tokenizers.byte_level())
    tiny_checkpoint(folder)
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        load_all(folder)


def test_a_model_without_a_tokenizer_says_so(tmp_path, caplog):
    tokenizer, _ = load_all(tiny_checkpoint(tmp_path))
    assert tokenizer is None and "tokenizer.json does not exist" in caplog.text


@pytest.mark.parametrize("fields, said", [
    ({"num_hidden_layers": 10**12}, "num_hidden_layers must be between 1 and 2048, got 1000000000000"),
    ({"hidden_size": -64}, "hidden_size must be between"),
    ({"head_dim": 10**30}, "head_dim"),
    ({"vocab_size": 2**24}, r"embed_tokens.weight has shape \[512, 64\].*asks for \[16777216, 64\]"),
    ({"intermediate_size": 2**20}, r"has shape \[96, 64\].*asks for \[1048576, 64\]"),
    ({"max_position_embeddings": 10**30}, "max_position_embeddings must be between"),
    ({"max_position_embeddings": 1}, "must be between 2 and"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be between 0 and 1, got nan"),
    ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta must be between"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be between"),
    ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta must be between"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be between 1 and"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": float("inf")}}, "factor must be between"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2**16}}, "context length.*16777216 tokens, got 33554432"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, "beta_fast must be between"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**400}}, "original_max"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0}}, "must be below high_freq_factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differs between layers"),
    ({"rope_parameters": {"rope_type": 5}}, "rope_type"),
])  # fmt: skip
def test_numbers_that_no_model_has_are_refused_before_memory_is_asked_for(fields, said, tmp_path):
    folder = tiny_checkpoint(tmp_path)
    change_config(folder, **fields)
    with pytest.raises(ValueError, match=f"{folder}.*{said}"):
        load_all(folder)


def test_numbers_in_place_of_weights_are_refused(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors: model.norm.weight holds torch.int8"):
        load_all(folder)


def test_mutated_safetensors_are_refused_at_once(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    whole, rng, num_refused = path.read_bytes(), random.Random(4), 0
    header_size = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(200):
        path.unlink()
        path.write_bytes(mutated(whole, rng, header_size))
        num_refused += assert_refused_or_loaded(folder)
    assert num_refused > 100


def test_a_tokenizer_file_of_noise_never_escapes_as_another_error(tmp_path):
    whole = json.loads(tiny_tokenizers.byte_level().to_str())
    rng, odd = random.Random(5), [None, -1, 2**64, "x", [], {}, [["a"]], {"a": -1}, True]
    for _ in range(200):
        damaged = json.loads(json.dumps(whole))
        part = rng.choice([damaged, damaged["model"], damaged["decoder"], damaged["pre_tokenizer"], rng.choice(damaged["added_tokens"])])
        # A wrong prefix makes the library abort its process, which no caller can help: the launcher then names the frontend.
        part[rng.choice([key for key in part if key != "continuing_subword_prefix"])] = rng.choice(odd)
        folder = make_folder(tmp_path, Tokenizer.from_str(json.dumps(whole)))
        (folder / "tokenizer.json").write_text(json.dumps(damaged))
        config = EngineConfig(model=str(folder), served_model_name="m", run_dir="", client_address="", epoch=1)
        try:
            tokenizer, _ = load_tokenizer(config)
            assert isinstance(tokenizer, ModelTokenizer)
        except ValueError as error:
            assert "tokenizer.json" in str(error)
