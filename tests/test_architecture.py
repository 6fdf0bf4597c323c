"""The package's shape: imports go downwards, files and functions stay short, what is public is listed and described."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lantern_hf

ROOT = Path(lantern_hf.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if "assets" not in path.relative_to(ROOT).parts)
MAX_FILE, MAX_FUNCTION, P90_FUNCTION = 350, 60, 30

# A module may import from its own layer only what is listed before it there, and anything above. Packages count whole.
LAYERS: list[list[str]] = [
    [
        "_version",
        "_registration",
        "_host",
        "_placement",
        "_wrappers",
        "_nearest",
        "_tree_presets",
        "_files",
        "_processes",
        "_fingerprint",
    ],
    ["_hub_errors", "_hub_download", "_hub_upload", "_hub_results", "_hub_training", "_hub_card", "_hub_push"],
    ["tree", "neighbors", "neighbor_cache", "stats", "relaxation"],
    ["config", "_neighborhood", "_verdict"],
    ["greedy", "acceptance"],
    ["cache", "_checkpointing", "sequences", "sampling", "outputs", "structure", "processors"],
    ["models", "draft_config", "head_files", "head_publishing", "draft_layers", "draft_files", "draft"],
    ["_captions", "targets", "images", "tree_support"],
    ["candidates", "prompts", "resolve", "session"],
    ["strategy"],
    ["attach"],
    ["hub", "_pipeline", "assets"],
    ["pipeline", "transformers_pipeline"],
    ["training", "evaluation", "convert", "many"],
    ["cli"],
]
# Uses of the library that know nothing of each other.
APART = {"training", "evaluation", "convert", "many"}


def module_of(path: Path) -> str:
    """First part of a file's name in the package; the package itself is `__init__`."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "lantern_hf" else []
            names = inner or [node.module or ""]
        found |= {name.split(".")[1] for name in names if name.startswith("lantern_hf.")}
    return found - {module_of(path)}


def rank(module: str) -> tuple[int, int]:
    """Layer and place of a module; the private parts of the pipeline share one."""
    module = "_pipeline" if module.startswith("_pipeline") else module
    for layer, names in enumerate(LAYERS):
        if module in names:
            return layer, names.index(module)
    raise AssertionError(f"`{module}` is in no layer; add it to LAYERS where it belongs")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    module = module_of(path)
    if module in ("__init__", "__main__"):
        return
    modules = {name for names in LAYERS for name in names}
    for other in imports(path):
        if other not in modules and other in lantern_hf.__all__:
            continue  # a name of the package itself, used by what stands above all of it
        if rank(other) == rank(module):
            continue  # both are private parts of the pipeline
        assert rank(other) < rank(module), f"{module} imports {other}, which is not below it"
        assert not {module, other} <= APART, f"{module} and {other} must not know each other"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    if text.strip() and path.name != "_version.py":
        assert ast.get_docstring(ast.parse(text)), "no module docstring"


def functions(path: Path) -> list[tuple[str, int]]:
    """Every function of a file, and its length without the docstring."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            # The signature of a command declares its options and their help, and is no code.
            start = first.lineno if module_of(path) == "cli" else node.lineno
            length = (node.end_lineno or 0) - start + 1
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                length -= (first.end_lineno or 0) - first.lineno + 1
            found.append((f"{path.relative_to(ROOT)}:{node.name}", length))
    return found


def test_functions_stay_short() -> None:
    lengths = sorted((length, name) for path in FILES for name, length in functions(path))
    long = [f"{name} has {length} lines" for length, name in lengths if length > MAX_FUNCTION]
    assert not long
    assert lengths[int(0.9 * len(lengths))][0] <= P90_FUNCTION


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_command_line_prints(path: Path) -> None:
    if module_of(path) == "cli":
        return
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]


def test_all_is_what_is_exported() -> None:
    assert lantern_hf.__all__ == sorted(lantern_hf.__all__, key=ruff_order)
    for name in lantern_hf.__all__:
        assert hasattr(lantern_hf, name), name


def ruff_order(name: str) -> tuple[int, str]:
    """Constants, classes, then the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("name", [name for name in lantern_hf.__all__ if name not in ("TREES", "__version__")])
def test_public_things_are_described(name: str) -> None:
    thing = getattr(lantern_hf, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing) and thing.__module__.startswith("lantern_hf"):
        for attribute, value in vars(thing).items():
            if not attribute.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, property | classmethod)
            ):
                assert inspect.getdoc(getattr(thing, attribute, value)), f"{name}.{attribute}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_and_classes_have_docstrings(path: Path) -> None:
    module = ast.parse(path.read_text())
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            assert ast.get_docstring(node), f"{node.name} has no docstring"
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_modules_export_what_their_all_says() -> None:
    for path in FILES:
        names = path.relative_to(ROOT).with_suffix("").parts
        if names[-1] in ("__init__", "__main__"):
            continue
        text = path.read_text()
        if "__all__ = [" not in text:
            continue
        module = importlib.import_module(".".join(("lantern_hf", *names)))
        assert [name for name in module.__all__ if not hasattr(module, name)] == [], path


def test_importing_the_package_is_light() -> None:
    code = "import sys, lantern_hf; print(sorted({'diffusers', 'datasets', 'typer', 'matplotlib'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
