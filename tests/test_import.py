"""What importing costs, and that the lazy package gives what it names."""

from __future__ import annotations

import subprocess
import sys

import lantern_hf

HEAVY = ("torch", "transformers", "diffusers")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_alone_loads_nothing_heavy() -> None:
    assert run(f"import sys, lantern_hf; print([m for m in {HEAVY} if m in sys.modules])").strip() == "[]"


def test_a_lazy_package_is_as_good_as_an_eager_one() -> None:
    """The pipeline alone needs diffusers; names win over submodules; Auto classes know ours."""
    code = """
import sys, lantern_hf, lantern_hf.attach
for name in lantern_hf.__all__:
    if "ipeline" not in name:
        getattr(lantern_hf, name)
assert callable(lantern_hf.attach), lantern_hf.attach
from transformers import AutoConfig
print(AutoConfig.for_model("lantern_draft").model_type, AutoConfig.for_model("llamagen").model_type)
print([m for m in ("diffusers", "datasets", "matplotlib") if m in sys.modules])
"""
    assert run(code).split("\n") == ["lantern_draft llamagen", "[]", ""]


def test_help_needs_no_torch() -> None:
    code = f"""
import sys
from lantern_hf.cli import app
try:
    app(["generate", "--help"])
except SystemExit:
    pass
print([m for m in {HEAVY} if m in sys.modules])
"""
    assert run(code).strip().endswith("[]")


def test_all_is_sorted_and_complete() -> None:
    assert set(lantern_hf.__all__) == {*lantern_hf._HOME, "__version__"}
    assert set(lantern_hf.__all__) <= set(dir(lantern_hf))
    assert not hasattr(lantern_hf, "no_such_name")
