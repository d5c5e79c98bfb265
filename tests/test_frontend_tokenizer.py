"""Tokenizers from folders and GGUF files, against transformers' own reading of the same files."""

import dataclasses
import json
import random
import struct
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, processors

from frontend.admission import Admission, Limits
from frontend.tokenizer import load_tokenizer
from protocol.config import EngineConfig
from protocol.gguf_header import read_header
from protocol.messages import ChatMessage, Generate
from protocol.sampling import SamplingParams
from tests import tiny_tokenizers

PIECES = ["The year 2024", " 3.14 ", "naïve Größe", "日本語の文字", "👩‍👩‍👧🇫🇷", "\n\n\t  x", "don't", "<|im_end|>", "</s>"]
PIECES += ["a" * 40, "  ", "\x00", "e\u0301"]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def config_of(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), served_model_name="m", run_dir="/nowhere", client_address="ipc:///nowhere/s", epoch=1)


def load(model: Path):
    return load_tokenizer(config_of(model))


def varied_texts(count: int) -> list[str]:
    rng = random.Random(5)
    mixed = ["".join(rng.choices(PIECES, k=rng.randint(1, 6))) for _ in range(count)]
    return ["", *PIECES, *tiny_tokenizers.corpus()[:count], *mixed]


def make_folder(folder: Path, tokenizer=None, **files: object) -> Path:
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


# ---- GGUF ---------------------------------------------------------------------------------------------------------


def test_smollm2_gives_the_ids_and_the_chat_text_of_transformers(smollm2):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    tokenizer, end_ids = load(smollm2)
    assert (tokenizer.size, end_ids) == (len(reference), {reference.eos_token_id})
    for text in varied_texts(500):
        assert tokenizer.encode(text) == reference(text)["input_ids"], text
    assert tokenizer.render(CHAT) == reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    for ids in ([1, 2, 3], tokenizer.encode("Größe 日本"), [5000, 2, 17]):
        text = "".join(map(tokenizer.detokenizer([]).feed, ids))
        assert text == reference.decode(ids, skip_special_tokens=True)


def write_gguf(path: Path, kind: str, tokenizer, **fields: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    added = tokenizer.get_added_tokens_decoder()
    writer.add_tokenizer_model(kind)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([gguf.TokenType.CONTROL if index in added else gguf.TokenType.NORMAL for _, index in vocab])
    writer.add_token_scores([-float(index) for _, index in vocab])
    if kind == "gpt2":
        writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.token_to_id("<s>"))
    writer.add_eos_token_id(tokenizer.token_to_id("</s>"))
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    for name, value in (("context_length", 64), ("block_count", 1), ("embedding_length", 8), ("head_count", 1)):
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "kind, make, fields",
    [
        ("llama", tiny_tokenizers.metaspace, {}),
        ("llama", tiny_tokenizers.metaspace, {"add_bos_token": False}),
        ("gpt2", tiny_tokenizers.byte_level, {"tokenizer_pre": "qwen2"}),
        ("gpt2", tiny_tokenizers.byte_level, {"tokenizer_pre": "llama-bpe", "add_bos_token": True}),
        ("gpt2", tiny_tokenizers.byte_level, {"tokenizer_pre": "default"}),
    ],
)
def test_gguf_tokenizers_give_the_ids_of_transformers(tmp_path, kind, make, fields):
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "model.gguf", kind, make(), **fields)
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    tokenizer, end_ids = load(path)
    assert end_ids == {reference.eos_token_id}
    for text in varied_texts(300):
        assert tokenizer.encode(text) == reference(text)["input_ids"], text


def test_unknown_kinds_are_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "gpt2", tiny_tokenizers.byte_level(), tokenizer_pre="unheard-of")
    with pytest.raises(ValueError, match="model.gguf: tokenizer.ggml.pre must be one of .*, got 'unheard-of'"):
        load(path)
    path = write_gguf(tmp_path / "other.gguf", "bert", tiny_tokenizers.byte_level())
    with pytest.raises(ValueError, match="tokenizer.ggml.model must be one of gpt2, llama, got 'bert'"):
        load(path)


def test_the_header_reader_agrees_with_the_gguf_package(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "gpt2", tiny_tokenizers.byte_level(), tokenizer_pre="qwen2")
    reader = gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert read_header(path).metadata == expected


def test_damaged_headers_are_refused_at_once(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", "gpt2", tiny_tokenizers.byte_level()).read_bytes()
    rng = random.Random(6)
    damaged = [whole[: rng.randrange(len(whole))] for _ in range(50)]
    damaged += [b"", b"GGUF", b"JSON" + whole[4:], whole[:4] + struct.pack("<I", 1) + whole[8:]]
    for position in rng.sample(range(4, 200), 150):  # single bytes of the first lengths and types
        damaged.append(whole[:position] + bytes([whole[position] ^ rng.randrange(1, 256)]) + whole[position + 1 :])
    path = tmp_path / "damaged.gguf"
    num_refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            read_header(path)
        except ValueError as error:
            assert str(path) in str(error)
            num_refused += 1
    assert num_refused >= 54


# ---- folders ------------------------------------------------------------------------------------------------------


def test_end_ids_come_from_every_file_that_names_some(tmp_path):
    tokenizer = tiny_tokenizers.byte_level()
    make_folder(tmp_path, tokenizer, config={"eos_token_id": 1}, generation_config={"eos_token_id": [1, 7]})
    make_folder(tmp_path, tokenizer_config={"eos_token": {"content": "<|im_end|>"}})
    assert load(tmp_path)[1] == {1, 7, tokenizer.token_to_id("<|im_end|>")}


def test_a_folder_without_a_tokenizer_still_ends_texts(tmp_path):
    assert load(make_folder(tmp_path, config={"eos_token_id": 3})) == (None, {3})


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        load(tmp_path)


@pytest.mark.parametrize("flag, text, num_bos", [(True, "a", 1), (False, "a", 0), (None, "a", 0), (True, "<s>a", 1), (True, "", 1)])
def test_bos_follows_the_flag_and_is_never_doubled(tmp_path, flag, text, num_bos):
    settings = {"bos_token": "<s>"} | ({} if flag is None else {"add_bos_token": flag})
    tokenizer, _ = load(make_folder(tmp_path, tiny_tokenizers.byte_level(), tokenizer_config=settings))
    assert tokenizer.encode(text).count(tokenizer.backend.token_to_id("<s>")) == num_bos


def test_bos_of_the_post_processor_is_kept_and_its_eos_is_not(tmp_path):
    backend = Tokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    names = ["<s>", "</s>"]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, backend.token_to_id(name)) for name in names]
    )
    tokenizer, _ = load(make_folder(tmp_path, backend))
    assert tokenizer.encode("a") == [backend.token_to_id("<s>"), *backend.encode("a", add_special_tokens=False).ids]


TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% generation %}>{% endgeneration %}"


@pytest.mark.parametrize("form", ["text", "list", "file"])
def test_templates_are_found_and_give_one_bos(tmp_path, form):
    settings = {"bos_token": "<s>", "add_bos_token": True}
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    else:
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
        settings["chat_template"] = TEMPLATE if form == "text" else named
    tokenizer, _ = load(make_folder(tmp_path, tiny_tokenizers.byte_level(), tokenizer_config=settings))
    text = tokenizer.render(CHAT)
    assert text == "<s>[user] What is the capital of France?\n>"
    assert tokenizer.encode(text).count(tokenizer.backend.token_to_id("<s>")) == 1


@pytest.mark.parametrize(
    "template, reason",
    [
        (None, "no chat template; start the engine with --chat-template FILE, or send a prompt"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
        ("{{ messages[5].content }}", "the chat template refused"),
        ("{{ 1 // 0 }}", "the chat template refused"),
    ],
)
def test_chats_that_cannot_be_rendered_say_why(tmp_path, template, reason):
    tokenizer, _ = load(make_folder(tmp_path, tiny_tokenizers.byte_level(), tokenizer_config={"chat_template": template}))
    with pytest.raises(ValueError, match=reason):
        tokenizer.render(CHAT)


def test_a_template_that_is_none_is_refused_at_load(tmp_path):
    with pytest.raises(ValueError, match="the chat template is damaged"):
        load(make_folder(tmp_path, tiny_tokenizers.byte_level(), tokenizer_config={"chat_template": "{% for %}"}))


def test_lone_surrogates_are_refused(tmp_path):
    tokenizer, _ = load(make_folder(tmp_path, tiny_tokenizers.byte_level()))
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")


# ---- admission ----------------------------------------------------------------------------------------------------


@pytest.fixture
def admission(tmp_path) -> Admission:
    tokenizer, _ = load(make_folder(tmp_path, tiny_tokenizers.byte_level()))
    return Admission(tokenizer, frozenset({1, 7}), Limits(max_model_len=10, vocab_size=600), None, seed=3)


def test_the_prompt_and_max_tokens_share_the_context(admission):
    def max_tokens(num_prompt: int, wanted: int | None) -> int:
        return admission.admit([5] * num_prompt, SamplingParams(max_tokens=wanted)).max_tokens

    assert [max_tokens(9, wanted) for wanted in (1, 2, None)] == [1, 1, 1]
    assert [max_tokens(8, wanted) for wanted in (1, 5, None)] == [1, 2, 2]
    for size in (10, 11):
        with pytest.raises(ValueError, match=f"the prompt is too long: it has {size} tokens.*context length of 10"):
            max_tokens(size, 1)


@pytest.mark.parametrize(
    "ids, message", [([], "empty"), ([5, 600, 7], "between 0 and 599, got 600"), ([-1], "got -1"), ([2**63], "got 9223")]
)
def test_prompt_ids_are_checked(admission, ids, message):
    with pytest.raises(ValueError, match=message):
        admission.admit(ids, SamplingParams())


def test_ignore_eos_covers_every_end_id_of_the_model_and_none_of_the_clients(admission):
    special = admission.tokenizer.special_ids["<|im_end|>"]
    assert admission.admit([5], SamplingParams()).end_ids == {1, 7}
    params = SamplingParams(ignore_eos=True, stop_token_ids=[9], stop=["<|im_end|>", "plain"])
    assert admission.admit([5], params).end_ids == {9, special}


def test_seeds_are_the_clients_or_reproducible(admission, tmp_path):
    again = Admission(None, frozenset(), admission.limits, None, seed=3)
    seeds = [[each.admit([5], SamplingParams()).sampling.seed for _ in range(20)] for each in (admission, again)]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 20 and min(seeds[0]) < 0 < max(seeds[0])
    assert admission.admit([5], SamplingParams(seed=42)).sampling.seed == 42


def test_exactly_one_prompt_is_asked_for(admission):
    turns = [ChatMessage("user", "x")]
    assert admission.needs_text(Generate(1, prompt="")) and not admission.needs_text(Generate(1, prompt_ids=[]))
    for request in (Generate(1), Generate(1, prompt="a", messages=turns), Generate(1, prompt="a", prompt_ids=[1])):
        with pytest.raises(ValueError, match="exactly one of prompt, prompt_ids and messages"):
            admission.needs_text(request)


def test_texts_far_too_long_are_refused_before_they_are_tokenised(admission):
    untouchable = dataclasses.replace(admission.tokenizer, backend=None)
    admission.tokenizer = untouchable
    with pytest.raises(ValueError, match="prompt may have at most 640 characters, got 641"):
        admission._tokenize(Generate(1, prompt="x" * 641))
