"""Reads the flags of protocol.flags from the command line, the environment and a file, which beat each other in this order.

Every reader raises ValueError with one line that names the place, the flag and what is wrong.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from protocol.flags import BY_KEY, BY_NAME, GROUPS, Flag, key_of, why_unknown

PREFIX = "STEPAHEAD_"
FAILPOINT = "STEPAHEAD_FAIL"  # no flag: for tests
HELP_COLUMNS = 100

# What Kubernetes sets in every pod beside a service whose name begins with ours. PORT alone is theirs where its value is an address.
KUBERNETES = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)=|(\w+_)?PORT=(tcp|udp|sctp)://")

NEGATIVE_NUMBER = re.compile(r"-\.?\d")
SWITCH_TEXTS = {"1": True, "true": True, "0": False, "false": False}


def parse_arguments(arguments: list[str], environment: dict[str, str] | None = None) -> dict[str, object]:
    """What was said, by the flags' fields; nothing about the rest. `--help` ends the process."""
    by_command_line = _read_command_line(arguments)
    by_environment = _read_environment(environment or {})
    file = by_command_line.get("config", by_environment.get("config"))
    return (_read_file(file) if file is not None else {}) | by_environment | by_command_line


# ---- the command line ---------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(message)


class _Help(argparse.HelpFormatter):
    """Names first, and the value once."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=HELP_COLUMNS)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return action.metavar
        value = "" if action.nargs == 0 else f" {action.metavar}"
        return ", ".join(action.option_strings) + value


class _Keep(argparse.Action):
    """Notes each flag as it was spelled, with its text; None is what a switch says by being there."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: object, option_string: str | None = None) -> None:
        namespace.given.append((option_string, None if values == [] else values))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the flags' table."""
    parser = _Parser(
        prog="launch.py",
        usage="launch.py [MODEL] [FLAG ...]",
        description="Serve a language model.",
        epilog=f"Every flag may also stand in the environment, as {PREFIX}MAX_NUM_SEQS=8 does, or in a file.",
        allow_abbrev=False,
        formatter_class=_Help,
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        if title == "model":
            group.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same without a flag's name")
        for flag in flags:
            group.add_argument(
                *flag.names,
                dest=flag.field,
                action=_Keep,
                nargs=0 if flag.type is bool else None,
                default=argparse.SUPPRESS,
                metavar=flag.value_name,
                help=argparse.SUPPRESS if flag.is_hidden else flag.full_help.replace("%", "%%"),
            )
    return parser


def _read_command_line(arguments: list[str]) -> dict[str, object]:
    for argument in arguments:
        if argument == "--":
            break
        _check_known(argument)
    found = make_parser().parse_args(arguments, argparse.Namespace(given=[]))
    said: dict[str, object] = {}
    for name, text in found.given:
        flag = BY_NAME[name]
        value = _value_of_text(flag, name, name, text)
        said[flag.field] = [*said.get(flag.field, []), *value] if flag.is_repeatable else value
    if found.positional_model is not None:
        if "model" in said:
            raise ValueError(f"two models given: {found.positional_model} and {said['model']}")
        said["model"] = found.positional_model
    return said


def _check_known(argument: str) -> None:
    """argparse would take `-t` for `-tp`, and name no flag that is near."""
    name = argument.split("=")[0]
    is_value = not name.startswith("-") or name == "-" or " " in name or NEGATIVE_NUMBER.match(name)
    if not is_value and name not in BY_NAME and name not in ("-h", "--help"):
        _refuse(name, name, lambda near: near)


# ---- the environment and the file ---------------------------------------------------------------------------------


def _read_environment(environment: dict[str, str]) -> dict[str, object]:
    said: dict[str, object] = {}
    for variable, text in sorted(environment.items()):
        key = variable.removeprefix(PREFIX)
        if key == variable or variable == FAILPOINT or KUBERNETES.match(f"{key}={text}"):
            continue
        name = _name_of(key.lower(), variable, lambda near: PREFIX + key_of(near).upper())
        _note(said, BY_NAME[name], variable, _value_of_text(BY_NAME[name], name, variable, text))
    return said


def _read_file(file: str) -> dict[str, object]:
    said: dict[str, object] = {}
    for key, value in _load(file).items():
        place = f"{file}: {key}"
        name = _name_of(str(key).replace("-", "_"), place, key_of)
        flag = BY_NAME[name]
        if flag.field == "config":
            raise ValueError(f"{place} cannot stand in a file")
        _note(said, flag, place, _value_of_file(flag, name, place, value))
    return said


def _load(file: str) -> dict[object, object]:
    try:
        found = _decode(Path(file).read_text("utf-8"), is_json=file.endswith(".json"))
    except OSError as error:
        raise ValueError(f"--config {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--config {file}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--config {file} must hold flags and values, one `flag: value` a line")
    return found


def _decode(text: str, is_json: bool) -> object:
    if is_json:
        return msgspec.json.decode(text)
    import yaml  # most starts need not wait for it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _name_of(key: str, place: str, spell: Callable[[str], str]) -> str:
    return BY_KEY.get(key) or _refuse(f"--{key.replace('_', '-')}", place, spell)


def _refuse(name: str, place: str, spell: Callable[[str], str]) -> None:
    problem, nearest = why_unknown(name)
    raise ValueError(f"{place} {problem}{f' {spell(nearest)}' if nearest else ''}")


def _note(said: dict[str, object], flag: Flag, place: str, value: object) -> None:
    if said.setdefault(flag.field, value) != value:
        raise ValueError(f"{place} contradicts another name of the same flag, one of {', '.join(flag.names)}")


# ---- values -------------------------------------------------------------------------------------------------------


def _value_of_text(flag: Flag, name: str, place: str, text: str | None) -> object:
    """From the command line or the environment."""
    if flag.type is bool:
        value = True if text is None else SWITCH_TEXTS.get(text.lower(), text)
    elif flag.is_repeatable:
        value = [text]
    else:
        try:
            value = flag.type(text) if flag.type in (int, float) else text
        except ValueError:
            raise _wrong_type(flag, place, text) from None
    return _checked(flag, name, place, value)


def _value_of_file(flag: Flag, name: str, place: str, value: object) -> object:
    if flag.is_repeatable and isinstance(value, str):
        value = [value]
    if value == []:
        raise ValueError(f"{place} holds no value")
    return _checked(flag, name, place, value)


def _checked(flag: Flag, name: str, place: str, value: object) -> object:
    try:
        value = msgspec.convert(value, flag.type)
    except msgspec.ValidationError:
        raise _wrong_type(flag, place, value) from None
    if flag.is_always_on and not value:
        raise ValueError(f"{place} cannot be turned off")
    return not value if name in flag.off_names else value


def _wrong_type(flag: Flag, place: str, value: object) -> ValueError:
    if flag.choices:
        wanted = f"one of {', '.join(flag.choices)}"
    else:
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(flag.type, "text, or a list of texts")
    got = type(value).__name__ if flag.is_repeatable else repr(value)  # an API key is nobody's business
    return ValueError(f"{place} must be {wanted}, got {got}")
