"""The README's table of flags, made from protocol.flags: `python -m tests.flags_table` writes it anew."""

from pathlib import Path

from protocol.flags import GROUPS, Flag

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- flags: made by python -m tests.flags_table -->\n", "<!-- end of flags -->\n"


def row(flag: Flag) -> str:
    names = " ".join(f"`{name}`" for name in flag.names)
    value = ", ".join(f"`{choice}`" for choice in flag.choices) or flag.value_name.replace("|", " or ")
    return f"| {names} | {value} | {flag.full_help} |\n"


def table() -> str:
    """All flags but the hidden ones."""
    shown = [flag for flags in GROUPS.values() for flag in flags if not flag.is_hidden]
    return "| Flag, and its other names | Value | Meaning |\n|---|---|---|\n" + "".join(map(row, shown))


def split_readme() -> tuple[str, str, str]:
    """What is before the table, the table, and what is behind it."""
    before, rest = README.read_text().split(BEGIN)
    found, after = rest.split(END)
    return before, found, after


if __name__ == "__main__":
    before, _, after = split_readme()
    README.write_text(before + BEGIN + table() + END + after)
