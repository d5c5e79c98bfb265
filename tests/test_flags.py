"""Flags by command line, environment and file: every one means the same in each place, and a wrong one is one clear line."""

import hashlib
import json
import re
import typing
from pathlib import Path

import msgspec
import pytest

import launch
from protocol.arguments import HELP_COLUMNS, PREFIX, make_parser, parse_arguments
from protocol.config import BLOCK_SIZES, BOUNDS, EngineConfig
from protocol.flags import BY_KEY, BY_NAME, FLAGS, LAUNCH_TYPES, NEAREST, UNSUPPORTED, Flag, key_of
from tests.engine_process import EngineProcess
from tests.flags_table import split_readme, table

CHECKSUM = ("--executor", "checksum")
MADE_BY_THE_LAUNCHER = {"run_dir", "client_address", "epoch", "api_key_hashes", "cache_dir", "failpoint", "http_fd"}
PLACES = ("model", "config")  # of files that must be there
BESIDE = {"preemption_mode": ("--swap-space", "1")}  # what a flag needs to mean something


def config(*arguments: str, **environment: str) -> EngineConfig:
    made = launch.make_config(parse_arguments([*CHECKSUM, *arguments], environment), environment)
    return msgspec.structs.replace(made, epoch=0)


def value_of(flag: Flag, folder: Path) -> object:
    """One that is allowed, and is not the default where there is another."""
    match flag.field:
        case "executor":
            return "checksum"
        case "served_model_name" | "host" | "metrics_prefix" | "api_key":
            return "another"
        case "zmq_listen":
            return f"ipc://{folder}/door"
        case "uds" | "trace_dir":
            return str(folder / "place")
        case "api_key_file" | "chat_template":
            (folder / "file").write_text("text")
            (folder / "file").chmod(0o600)
            return str(folder / "file")
        case "block_size":
            return BLOCK_SIZES[0]
    if flag.choices:
        return flag.choices[-1]
    low, high = BOUNDS[flag.field]
    return flag.type(min(high, low + 1))


# ---- every flag ---------------------------------------------------------------------------------------------------


def test_every_setting_has_a_flag_and_every_flag_a_setting():
    fields = set(EngineConfig.__struct_fields__)
    assert {flag.field for flag in FLAGS} == fields - MADE_BY_THE_LAUNCHER | LAUNCH_TYPES.keys()
    assert len(FLAGS) == len({flag.field for flag in FLAGS}) and len(BY_NAME) == sum(len(flag.names) for flag in FLAGS)
    assert {flag.type for flag in FLAGS if not flag.choices} == {bool, int, float, str, list[str]}
    assert all(typing.get_origin(flag.type) is not typing.Union for flag in FLAGS)


@pytest.mark.parametrize("name", [name for name, flag in BY_NAME.items() if flag.type is not bool and flag.field not in PLACES])
def test_a_value_means_the_same_by_every_name_in_every_place(name, tmp_path):
    flag = BY_NAME[name]
    value, beside = value_of(flag, tmp_path), BESIDE.get(flag.field, ())
    expected = config(*beside, flag.names[0], str(value))
    assert flag.field in LAUNCH_TYPES or getattr(expected, flag.field) in (value, "text")
    assert flag.field in ("executor", "kv_cache_dtype", "tensor_parallel_size") or expected != config(*beside)
    assert config(*beside, name, str(value)) == config(*beside, f"{name}={value}") == expected
    if name.startswith("--"):
        assert config(*beside, **{PREFIX + key_of(name).upper(): str(value)}) == expected
        assert in_file(tmp_path, {key_of(name): value}, *beside) == expected
        assert in_file(tmp_path, {name.removeprefix("--"): [value] if flag.is_repeatable else value}, *beside) == expected


@pytest.mark.parametrize("name", [name for name, flag in BY_NAME.items() if flag.type is bool and not flag.is_always_on])
def test_a_switch_turns_the_same_way_in_every_place(name, tmp_path):
    field, variable = BY_NAME[name].field, PREFIX + key_of(name).upper()
    on = name not in BY_NAME[name].off_names
    for value, texts in ((True, ("1", "true", "True")), (False, ("0", "false", "FALSE"))):
        said = [parse_arguments([], {variable: text}) for text in texts] + [parse_arguments([name])] * value
        for suffix in ("json", "yaml"):
            (tmp_path / f"f.{suffix}").write_text(json.dumps({key_of(name): value}))
            said.append(parse_arguments(["--config", str(tmp_path / f"f.{suffix}")]))
            said[-1].pop("config", None)
        assert all(each == {field: on == value} for each in said)
    if field != "http":
        assert getattr(config(name), field) is on


@pytest.mark.parametrize("name", ["--model", "--model-path", "-m", None])
def test_a_model_means_the_same_by_every_name(name, tmp_path):
    (tmp_path / "config.json").touch()
    arguments = [str(tmp_path)] if name is None else [name, str(tmp_path)]
    expected = launch.make_config(parse_arguments([], {"STEPAHEAD_MODEL": str(tmp_path)}), {})
    assert msgspec.structs.replace(launch.make_config(parse_arguments(arguments), {}), epoch=expected.epoch) == expected
    assert expected.model == expected.served_model_name == str(tmp_path)


def in_file(folder: Path, values: dict, *arguments: str, suffix: str = "json") -> EngineConfig:
    file = folder / f"flags.{suffix}"
    file.write_text(json.dumps(values))
    return config("--config", str(file), *arguments)


# ---- which place wins ---------------------------------------------------------------------------------------------


def test_the_command_line_beats_the_environment_which_beats_the_file(tmp_path):
    (tmp_path / "f.yaml").write_text("# ours\nmax-running-requests: 2\nseed: 2\nport: 2\napi-key: [a, b]\nenforce-eager: true\n")
    environment = {"STEPAHEAD_CONFIG": str(tmp_path / "f.yaml"), "STEPAHEAD_SEED": "3", "STEPAHEAD_MAX_NUM_SEQS": "3"}
    made = config("--max-num-seqs", "4", "--no-enforce-eager", **environment)
    assert (made.max_num_seqs, made.seed, made.port, made.enforce_eager, len(made.api_key_hashes)) == (4, 3, 2, False, 2)
    assert len(config("--api-key", "c", **environment).api_key_hashes) == 1
    (tmp_path / "g.yaml").write_text("seed: 9")
    assert config("--config", str(tmp_path / "g.yaml"), **environment).port == config().port
    assert config("--seed", "1", "--seed", "-2").seed == -2


def test_what_nobody_says_is_the_configurations_default():
    made = msgspec.structs.asdict(config())
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineConfig) if field.default is not msgspec.NODEFAULT}
    assert {field: made[field] for field in defaults} == defaults | {"executor": "checksum", "cache_dir": made["cache_dir"]}
    assert config("--no-http", **{"STEPAHEAD_HTTP": "1"}).port is None


# ---- API keys and templates ---------------------------------------------------------------------------------------


def test_keys_are_kept_as_hashes_only(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("# ours\n\nöffne\n  second \nfirst\n")
    file.chmod(0o600)
    made = config("--api-key", "first", "--api-key", "third", "--api-key-file", str(file))
    assert made.api_key_hashes == [hashlib.sha256(key.encode()).hexdigest() for key in ("first", "third", "öffne", "second")]
    assert not caplog.records
    file.chmod(0o644)
    config("--api-key-file", str(file))
    assert [record.getMessage() for record in caplog.records] == [f"--api-key-file {file} can be read by other users: its mode is 644"]


@pytest.mark.parametrize("text", ["", "# only a comment\n", " \n\n"])
def test_a_file_without_keys_does_not_open_the_door(text, tmp_path):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match="holds no key"):
        config("--api-key-file", str(tmp_path / "keys"))


@pytest.mark.parametrize("said", [("--api-key", ""), ("--api-key", " secret"), ("--api-key", "sec\nret"), ("--api-key=sec\udcffret",)])
def test_a_key_that_no_client_could_send_is_refused_and_not_shown(said):
    with pytest.raises(ValueError, match="--api-key must give printable text") as caught:
        config(*said)
    assert "sec" not in str(caught.value)


@pytest.mark.parametrize("values", [{"api_key": []}, {"api_key": 123456}, {"api_key": ["x", 123456]}])
def test_keys_of_a_wrong_type_are_refused_and_not_shown(values, tmp_path):
    with pytest.raises(ValueError, match="flags.json: api_key (holds no value|must be text, or a list of texts, got (int|list))$"):
        in_file(tmp_path, values)


def test_a_chat_template_is_a_text_or_a_file(tmp_path):
    (tmp_path / "t.jinja").write_text("Größe {{ m }}\n")
    assert config("--chat-template", str(tmp_path / "t.jinja")).chat_template == "Größe {{ m }}\n"
    assert config("--chat-template", "{{ m }}").chat_template == "{{ m }}"
    with pytest.raises(ValueError, match="--chat-template is no file that can be read, and no template, .*: .*No such file"):
        config("--chat-template", str(tmp_path / "none.jinja"))
    with pytest.raises(ValueError, match="--chat-template is no file"):
        config("--chat-template", "{\udcff}")


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, said", [
    (["--max-num-seq", "8"], "--max-num-seq is unknown; nearest is --max-num-seqs"),
    (["--max_num_seqs=8"], "--max_num_seqs is unknown; nearest is --max-num-seqs"),
    (["-t", "8"], "-t is not supported; nearest is --num-threads"),
    (["-ngl", "99"], "-ngl is not supported; nearest is --device"),
    (["model", "--ctx-size", "0"], "--ctx-size is not supported; nearest is --max-model-len"),
    (["--trust-remote-code"], "--trust-remote-code is not supported; there is nothing like it"),
    (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype must be one of auto, got 'fp8'"),
    (["--max-num-seqs", "x"], "--max-num-seqs must be a whole number, got 'x'"),
    (["--max-running-requests", "1.5"], "--max-running-requests must be a whole number, got '1.5'"),
    (["--swap-space", ""], "--swap-space must be a number, got ''"),
    (["--port"], "argument --port: expected one argument"),
    (["--enforce-eager=1"], "argument --enforce-eager/--disable-cuda-graph/--no-enforce-eager: ignored explicit argument '1'"),
    (["a", "b"], "unrecognized arguments: b"),
    (["--preemption-mode", "swap"], "--preemption-mode swap needs --swap-space"),
    (["--preemption-mode", "recompute", "--swap-space", "1"], "--swap-space has no effect with --preemption-mode recompute"),
    (["--kv-cache-gib", "1", "--num-kv-blocks", "9"], "--kv-cache-gib has no effect with --num-kv-blocks"),
    (["--no-http", "--host", "::"], "--host has no effect with --no-http"),
    (["--no-http", "--api-key", "x"], "--api-key has no effect with --no-http"),
    (["--no-http", "--uds", "x"], "--uds has no effect with --no-http"),
    (["--uds", "x", "--host", "::"], "--host has no effect with --uds"),
    (["--uds", ""], "--uds must be printable text on one line, got ''"),
    (["--host", "a\nb"], "--host must be printable text on one line, got 'a\\nb'"),
    (["--metrics-prefix", "9:"], "--metrics-prefix must be letters, digits and _, no digit first, got '9:'"),
    (["--uds", "x", "--port", "1"], "--port has no effect with --uds"),
])  # fmt: skip
def test_a_wrong_flag_is_refused_in_one_line(arguments, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        config(*arguments)


@pytest.mark.parametrize("variable, text, said", [
    ("STEPAHEAD_MAX_SEQS", "8", "STEPAHEAD_MAX_SEQS is unknown; nearest is STEPAHEAD_MAX_NUM_SEQS"),
    ("STEPAHEAD_QUANTIZATION", "awq", "STEPAHEAD_QUANTIZATION is not supported; there is nothing like it"),
    ("STEPAHEAD_MAX_NUM_SEQS", "many", "STEPAHEAD_MAX_NUM_SEQS must be a whole number, got 'many'"),
    ("STEPAHEAD_ENFORCE_EAGER", "yes", "STEPAHEAD_ENFORCE_EAGER must be true or false, got 'yes'"),
    ("STEPAHEAD_METRICS", "0", "STEPAHEAD_METRICS cannot be turned off"),
    ("STEPAHEAD_TP", "1", "STEPAHEAD_TP_SIZE contradicts another name of the same flag, "
     "one of --tensor-parallel-size, -tp, --tp, --tp-size"),
])  # fmt: skip
def test_a_wrong_variable_is_refused_in_one_line(variable, text, said):
    other = {"STEPAHEAD_TP_SIZE": "2"} if variable.endswith("TP") else {}
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        config(**{variable: text}, **other)


def test_variables_of_others_are_passed_over():
    others = {
        "STEPAHEAD_SERVICE_HOST": "10.0.0.1",
        "STEPAHEAD_SERVICE_PORT": "8000",
        "STEPAHEAD_SERVICE_PORT_HTTP": "8000",
        "STEPAHEAD_PORT": "tcp://10.0.0.1:8000",
        "STEPAHEAD_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "STEPAHEAD_PORT_8000_TCP_ADDR": "10.0.0.1",
        "STEPAHEAD_BLUE_PORT": "tcp://10.0.0.1:8000",
        "VLLM_SEED": "1",
        "stepahead_seed": "1",
    }
    assert config(**others) == config()
    assert config(STEPAHEAD_FAIL="worker.step:1:kill").failpoint == "worker.step:1:kill"


@pytest.mark.parametrize("name, text, said", [
    ("f.yaml", "max-seqs: 8", "FILE: max-seqs is unknown; nearest is max_num_seqs"),
    ("f.yaml", "quantization: awq", "FILE: quantization is not supported; there is nothing like it"),
    ("f.yaml", "max_num_seqs: '8'", "FILE: max_num_seqs must be a whole number, got '8'"),
    ("f.yaml", "max_num_seqs: true", "FILE: max_num_seqs must be a whole number, got True"),
    ("f.yaml", "seed:", "FILE: seed must be a whole number, got None"),
    ("f.yaml", "dtype: int8", "FILE: dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
    ("f.yaml", "enforce-eager: 2", "FILE: enforce-eager must be true or false, got 2"),
    ("f.yaml", "host: [a]", "FILE: host must be text, got ['a']"),
    ("f.yaml", "config: g.yaml", "FILE: config cannot stand in a file"),
    ("f.yaml", "seed: 1\nrandom_seed: 2", "FILE: random_seed contradicts another name of the same flag, one of --seed, --random-seed"),
    ("f.yaml", "8: 9", "FILE: 8 is unknown; nearest is"),
    ("f.yaml", "- seed", "--config FILE must hold flags and values"),
    ("f.yaml", "", "--config FILE must hold flags and values"),
    ("f.yaml", "a: [", "--config FILE: while parsing a flow node"),
    ("f.json", "{", "--config FILE: Input data was truncated"),
    ("f.json", "[" * 100_000, "--config FILE: "),
    ("f.yaml", b"\xff", "--config FILE: "),
    ("f.yaml", None, "--config FILE: No such file or directory"),
])  # fmt: skip
def test_a_wrong_file_is_refused_in_one_line(name, text, said, tmp_path):
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        config("--config", str(file))
    assert str(caught.value).replace(str(file), "FILE").startswith(said) and "\n" not in str(caught.value)


def test_a_process_ends_with_code_2_and_one_line():
    engine = EngineProcess(*CHECKSUM, "--max-num-sequences", "8")
    try:
        assert engine.process.wait(30) == 2
        assert engine.errors() == "stepahead: --max-num-sequences is unknown; nearest is --max-num-seqs\n"
    finally:
        engine.kill_all()


def test_what_other_servers_turn_on_is_accepted_where_it_is_always_on():
    assert config("--enable-metrics", "--jinja", STEPAHEAD_METRICS="1") == config()


def test_what_is_not_supported_is_no_flag_and_what_is_nearest_is_one():
    assert not UNSUPPORTED.keys() & BY_NAME.keys() and len(UNSUPPORTED) == sum(len(names.split()) for names in NEAREST.values())
    assert all(nearest is None or not BY_NAME[nearest].is_hidden for nearest in NEAREST)
    assert len(BY_KEY) == sum(name.startswith("--") for name in BY_NAME)


def test_values_may_look_like_flags_where_they_cannot_be_meant_so():
    assert config("--seed", "-1").seed == -1
    assert config("--chat-template", "-{% x %}").chat_template == "-{% x %}"


# ---- what people read ---------------------------------------------------------------------------------------------


def test_the_help_mentions_each_flag_once_and_fits(capsys):
    text = make_parser().format_help()
    assert max(map(len, text.splitlines())) <= HELP_COLUMNS == 100
    for name, flag in BY_NAME.items():
        assert len(re.findall(rf"(?<![\w-]){name}(?![\w-])", text)) == (not flag.is_hidden), name
    for said in ("default: 64", "default: 0.9", "default: fcfs", "default: 127.0.0.1", "auto|recompute|swap"):
        assert said in text
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--help"])
    assert ended.value.code == 0 and capsys.readouterr().out == text


def test_the_readmes_table_is_that_of_the_flags():
    assert split_readme()[1] == table(), "run python -m tests.flags_table"
