"""The scripts `examples/self_distil.py` and `examples/train_head.py`, one after the other on a tiny pipeline."""

from __future__ import annotations

import runpy
from argparse import Namespace
from pathlib import Path

import PIL.Image
import pytest
from pipelines import tiny_pipeline

from lantern_hf import LanternDraftModel

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_scripts_make_data_and_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_pipeline(head=False).save_pretrained(tmp_path / "pipe")
    (tmp_path / "prompts.txt").write_text("red fox\nblue bird\n")
    common = {"model": str(tmp_path / "pipe"), "device": "cpu", "batch_size": 2}
    data = Namespace(**common, prompts=tmp_path / "prompts.txt", out=tmp_path / "data", per_prompt=2, shard_size=3)
    runpy.run_path(str(EXAMPLES / "self_distil.py"))["main"](data)
    training = Namespace(**common, data=tmp_path / "data", out=tmp_path / "head", steps=2, lr=1e-3)
    runpy.run_path(str(EXAMPLES / "train_head.py"))["main"](training)
    shown = capsys.readouterr().out
    assert "2 shards in" in shown
    assert "tokens a pass; head and sample.png are in" in shown
    with PIL.Image.open(tmp_path / "head/sample.png") as image:
        assert image.size == (16, 16)
    assert LanternDraftModel.from_pretrained(tmp_path / "head").config.target_model_type == "llamagen"
