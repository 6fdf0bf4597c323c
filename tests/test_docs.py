"""What the documentation tells people to type: commands are parsed, code is compiled, its names are looked up."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import prompt, tiny_head, tiny_llama
from pipelines import tiny_pipeline

from lantern_hf import LanternDraftModel
from lantern_hf.cli import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PACKAGES = ("lantern_hf", "transformers", "diffusers", "torch", "PIL", "accelerate")
# Where an example stands for many, or is of a package of the reader's.
PLACEHOLDERS = {"..."}


def blocks(page: Path, *languages: str) -> list[str]:
    """Blocks of a page in some languages."""
    return [code for language, code in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands() -> list[tuple[str, str]]:
    """Every command line of every page, with its page."""
    found = []
    for page in PAGES:
        for code in blocks(page, "bash", "console", "sh", ""):
            lines = code.replace("\\\n", " ").splitlines()
            found += [(named(page), line.removeprefix("$ ").strip()) for line in lines if line.strip()]
    return found


def arguments_of(line: str) -> list[str] | None:
    """What a line gives to `lantern-hf`, None if it calls something else."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["lantern-hf"]:
        return words[1:]
    return words[words.index("lantern_hf.cli") + 1 :] if "lantern_hf.cli" in words else None


LINES = [(page, line) for page, line in commands() if arguments_of(line)]


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}-{line[:40]}" for page, line in LINES])
def test_commands_are_understood(page: str, line: str) -> None:
    """Parsed by the command line itself, as far as running: options, values, what is required."""
    group: Any = typer.main.get_command(app)
    words = [word for word in arguments_of(line) or [] if word not in PLACEHOLDERS]
    context = group.make_context("lantern-hf", list(words))
    name, command, rest = group.resolve_command(context, words)
    command.make_context(name, rest, parent=context).close()


def test_scripts_that_are_named_are_there() -> None:
    found = {word for _, line in commands() for word in line.split() if re.fullmatch(r"examples/[\w/]+\.py", word)}
    for page in PAGES:
        found |= set(re.findall(r"`(examples/[\w/]+\.py)`", page.read_text(encoding="utf-8")))
    assert len(found) >= 8
    assert [script for script in sorted(found) if not (ROOT / script).is_file()] == []


def imported(tree: ast.Module) -> dict[str, Any]:
    """Names that a block imports from the packages we know, each with what it is."""
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PACKAGES:
                    module = importlib.import_module(alias.name)
                    names[alias.asname or alias.name.split(".")[0]] = (
                        module if alias.asname else importlib.import_module(alias.name.split(".")[0])
                    )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            module = importlib.import_module(node.module or "")
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return names


def resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    """The object that a dotted name means, None where it is not known. A known one without such an attribute fails."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := resolved(node.value, names)) is not None:
        return getattr(owner, node.attr)
    return None


def unknown_keywords(call: ast.Call, function: Any) -> list[str]:
    """Keywords of a call that the function does not take."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of compiled functions
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [word.arg for word in call.keywords if word.arg is not None and word.arg not in parameters]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=named)
def test_code_compiles_and_its_names_exist(page: Path) -> None:
    """Names hold from block to block of a page, as a reader goes on."""
    names: dict[str, Any] = {}
    for code in blocks(page, "python"):
        tree = ast.parse(code)
        compile(tree, named(page), "exec")
        names |= imported(tree)
        assigned = {
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        known = {name: value for name, value in names.items() if name not in assigned}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (function := resolved(node.func, known)) is not None:
                assert unknown_keywords(node, function) == [], ast.unparse(node)
            elif isinstance(node, ast.Attribute):
                resolved(node, known)


def test_the_page_on_neighbor_tables_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANTERN_HF_CACHE", str(tmp_path / "cache"))
    space: dict[str, Any] = {}
    for code in blocks(ROOT / "docs/reference/neighbor-tables.md", "python"):
        exec(code, space)
    assert space["table"].k == 10
    assert (tmp_path / "neighbors.safetensors").is_file()


def test_the_pages_on_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model makes its data, a head is trained on them, and a pipeline takes it."""
    monkeypatch.chdir(tmp_path)
    tiny_pipeline(head=False).save_pretrained("FOLDER")
    Path("prompts.txt").write_text("red fox\n")
    (make_data,) = blocks(ROOT / "docs/how-to/self-distil.md", "python")
    load, train = blocks(ROOT / "docs/how-to/train.md", "python")
    assert "steps=4000" in train
    space: dict[str, Any] = {}
    for code in (make_data, train.replace("steps=4000", "steps=1"), load):
        exec(code, space)
    assert isinstance(space["pipe"].draft_head, LanternDraftModel)


def test_the_page_on_devices_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the block on quantisation, whose calls the tests of devices make."""
    monkeypatch.chdir(tmp_path)
    model = tiny_llama()
    model.save_pretrained("TARGET")
    tiny_head(model).save_pretrained("HEAD")
    space: dict[str, Any] = {"inputs": prompt(model)}
    for code in blocks(ROOT / "docs/how-to/devices.md", "python")[:2]:
        exec(code, space)
    assert space["tokens"].shape[1] == space["inputs"]["input_ids"].shape[1] + 24
