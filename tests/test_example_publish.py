"""`examples/publish_head.py` against a Hub in memory, and the commands of the how-to page."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest
from conftest import tiny_chameleon, tiny_head
from fake_hub import CLIENT_WARNING, FakeHub, connect
from typer.testing import CliRunner

from lantern_hf.cli import app

pytestmark = CLIENT_WARNING

ROOT = Path(__file__).parent.parent
RESULT = '{"steps": {"eagle_25 strict": {"tokens_per_pass": 2.5}}}'


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub without a network, and a folder with what the examples name."""
    monkeypatch.chdir(tmp_path)
    tiny_head(tiny_chameleon()).save_pretrained("my-head")
    Path("runs").mkdir()
    Path("runs/benchmark.json").write_text(RESULT)
    PIL.Image.new("RGB", (4, 4)).save("fox.png")
    with connect(monkeypatch, tmp_path / "cache") as fake:
        yield fake


@pytest.mark.parametrize("pull_request", [False, True])
def test_the_script(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pull_request: bool
) -> None:
    arguments = ["--head", "my-head", "--repo", "me/head", "--license", "mit", "--benchmark", "runs/benchmark.json"]
    arguments += ["--image", "fox.png", *(["--create-pr"] if pull_request else [])]
    monkeypatch.setattr(sys, "argv", ["publish_head.py", *arguments])
    runpy.run_path(str(ROOT / "examples" / "publish_head.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("https://huggingface.co/me/head/" + ("discussions" if pull_request else "commit"))
    assert lines[1] == "pulled back: bit for bit the same"


def test_the_commands_and_code_of_the_page(hub: FakeHub) -> None:
    page = (ROOT / "docs" / "how-to" / "publish.md").read_text().replace("someone/", "me/")
    commands = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert len(commands) == 2
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command.replace("\\\n", " "))[1:])
        assert result.exit_code == 0, result.stderr
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "push_to_hub" in block)
    exec(compile(code, "publish.md", "exec"), {})
    assert [entry[2] for entry in hub.repos["me/anole-7b-lantern-head"].log[1:]] == ["Upload draft head"] * 2
