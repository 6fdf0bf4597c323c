"""`model.generate(custom_generate="user/head")`: a published head runs without `lantern_hf` having been imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import prompt, tiny_chameleon, tiny_head, tiny_llama, tiny_llamagen
from fake_hub import CLIENT_WARNING, TOKEN, FakeHub, connect
from hub_server import serve

import lantern_hf
from lantern_hf import LanternConfig
from lantern_hf.hub import generate_with_head

pytestmark = CLIENT_WARNING

CHILD = """
import sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor([[5, 9, 3]])
plain = model.generate(ids, max_new_tokens=12, do_sample=False)
assert not [name for name in sys.modules if name.startswith("lantern_hf")]
for _ in range(2):
    drafted = model.generate(
        ids, custom_generate="me/head", trust_remote_code=True, max_new_tokens=12, do_sample=False,
        return_dict_in_generate=True,
    )
    assert torch.equal(drafted.sequences, plain), (drafted.sequences, plain)
assert "lantern_hf.strategy" in sys.modules
print(drafted.stats.passes, drafted.stats.new_tokens)
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub without a network."""
    with connect(monkeypatch, tmp_path / "cache") as fake:
        yield fake


def test_runs_in_a_process_that_never_imported_us(hub: FakeHub, tmp_path: Path) -> None:
    target = tiny_llama()
    target.save_pretrained(tmp_path / "target")
    head = tiny_head(target)
    assert head.config.lantern_config is None  # a push fills in settings that suit a target without codebook
    head.push_to_hub("me/head")
    hub.requests.clear()
    with serve(hub) as endpoint:
        env = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
        env |= {"PYTHONPATH": str(Path(lantern_hf.__file__).parent.parent), "HF_HUB_DISABLE_XET": "1"}
        env |= {"PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-c", CHILD, str(tmp_path / "target")]
        result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("[12]\n")
    assert hub.count("GET .*/custom_generate/generate.py") == 1
    assert hub.count("GET .*/model.safetensors") == 1  # loaded once, used twice


def test_the_published_code_names_its_repository(hub: FakeHub) -> None:
    tiny_head(tiny_llama()).push_to_hub("head")
    repo = hub.repos["me/head"]
    code = repo["custom_generate/generate.py"].decode()
    assert 'HEAD = "me/head"' in code
    assert repo["custom_generate/requirements.txt"].decode() == f"lantern_hf>={lantern_hf.__version__}\n"
    scope: dict = {}
    exec(compile(code, "generate.py", "exec"), scope)  # needs nothing at import
    assert scope["generate"].__kwdefaults__ == {"assistant": "me/head"}


@pytest.mark.parametrize("attached", [False, True])
def test_arguments_reach_the_decoding(hub: FakeHub, attached: bool) -> None:
    target = tiny_llamagen()
    head = tiny_head(target)
    head.config.lantern_config = LanternConfig.strict("narrow_8").to_dict()
    head.push_to_hub("me/head", revision="v1")
    inputs = prompt(target, rows=2, guidance=True) | {"guidance_scale": 2.0, "max_new_tokens": 16, "do_sample": False}
    expected = target.generate(**inputs)
    if attached:
        lantern_hf.attach(target, assistant=head, default_on=True)
    streamed: list = []
    streamer = type("Rows", (), {"put": lambda self, value: streamed.append(value), "end": lambda self: None})()
    result = generate_with_head(
        target, **inputs, assistant="me/head", revision="v1", streamer=streamer, return_dict_in_generate=True
    )
    assert torch.equal(result.sequences, expected)
    assert torch.equal(torch.stack(streamed[1:], dim=1), expected[:, -16:])
    assert isinstance(target, lantern_hf.attach.__globals__["LanternMixin"]) is attached


def test_image_tokens_of_chameleon(hub: FakeHub) -> None:
    """Relaxed by default, with the target's own codebook."""
    target = tiny_chameleon()
    tiny_head(target).push_to_hub("me/head")
    inputs = prompt(target)
    inputs["input_ids"][:, -1] = 3  # begin of image
    torch.manual_seed(0)
    result = generate_with_head(
        target, **inputs, assistant="me/head", max_new_tokens=24, do_sample=True, return_dict_in_generate=True
    )
    assert result.sequences.shape == (1, 6 + 24)
    assert result.stats.relaxed_tv[0] > 0
