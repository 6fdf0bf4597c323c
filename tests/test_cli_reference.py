"""`docs/reference/cli.md` says what the commands say; `python tests/test_cli_reference.py` writes it anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.main import get_command

from lantern_hf.cli import app

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"
HEAD = """# Command line

`lantern-hf COMMAND`, or `python -m lantern_hf.cli COMMAND` as launchers want it. What a user can put right is told on
one line, with exit code 2 and before any work. This page is made from the commands' own help.
"""


def reference() -> str:
    """The page."""
    commands = get_command(app).commands
    return HEAD + "".join(section(name, command) for name, command in commands.items())


def section(name: str, command: Any) -> str:
    """A command and its parameters."""
    parameters = [parameter for parameter in command.params if parameter.name != "help"]
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    usage = " ".join(["lantern-hf", name, "[OPTIONS]", *map(shown_name, arguments)])
    text = " ".join(command.help.split())
    rows = "".join(row(one) for one in parameters)
    return f"\n## {name}\n\n{text}\n\n`{usage}`\n\n| | | default |\n|---|---|---|\n{rows}"


def row(parameter: Any) -> str:
    """A line of the table."""
    return f"| `{shown_name(parameter)}` | {' '.join((parameter.help or '').split())} | {default(parameter)} |\n"


def shown_name(parameter: Any) -> str:
    """A parameter as it is typed."""
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper()
    return "/".join([*parameter.opts, *parameter.secondary_opts])


def default(parameter: Any) -> str:
    """What holds when a parameter is left out."""
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return shown
    value = getattr(parameter.default, "value", parameter.default)
    return "" if value is None or value is False or parameter.required else f"`{value}`"


def test_the_page_is_the_help() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference()


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
