"""The scripts of `examples/emoji`, end to end on a handful of drawn squares: they fit together and resume."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

EMOJI = Path(__file__).parent.parent / "examples" / "emoji"
STYLES = ["noto", "fluent flat"]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EMOJI))
    for name in ("common", "emoji_data", "emoji_text", "train_vq", "train_target", "train_head", "build_bundle"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def draw_data(path: Path) -> None:
    """Forty pictures of coloured squares with captions, some of them held out by the hash."""
    rng = np.random.default_rng(0)
    images = np.full((40, 64, 64, 3), 255, dtype=np.uint8)
    for image in images:
        x, y = rng.integers(8, 40, 2)
        image[y : y + 16, x : x + 16] = rng.integers(0, 255, 3)
    captions = np.array([f"square number {index % 20}" for index in range(40)])
    np.savez_compressed(path, images=images, captions=captions, styles=np.array(STYLES * 20))


def test_only_the_text_tells_a_blind_row(scripts: None) -> None:
    from train_target import corrupt

    codes = torch.arange(64)[:, None].expand(64, 256)  # picture i is all i
    blind = torch.arange(64) % 2 == 0
    context = corrupt(codes, 0.2, blind, torch.Generator().manual_seed(0))
    own = (context == codes).float().mean(1)
    assert (own[~blind] > 0.7).all()
    assert (own[~blind] < 1).any()
    assert (own[blind] < 0.1).all()
    of_one_picture = (context == context[:, :1]).all(1)
    assert 8 < of_one_picture[blind].sum() < 24
    assert torch.equal(context[blind & of_one_picture], codes.roll(1, 0)[blind & of_one_picture])


def test_the_target_reads_its_own_draws(scripts: None) -> None:
    from train_target import mix

    codes, logits = torch.zeros(64, 256, dtype=torch.long), torch.zeros(64, 256, 4)
    logits[..., 0] = -torch.inf  # never drawn, so that every draw shows
    shares = (mix(codes, logits, 0.5, torch.Generator().manual_seed(0)) != codes).float().mean(1)
    assert 0.2 < shares.mean() < 0.3
    assert shares.max() < 0.6
    assert not mix(codes, logits, 0.0, torch.Generator().manual_seed(0)).any()


def test_what_is_predicted_ahead_reads_the_codes_between(scripts: None) -> None:
    from train_target import Ahead, build_target

    torch.manual_seed(0)
    target, codes = build_target(16, layers=2, hidden=32, caption_dim=8), torch.randint(16, (2, 256))
    ahead, states = Ahead(32), torch.randn(2, 256, 32)
    base = ahead(target, states, codes)
    assert [tuple(logits.shape) for logits in base] == [(2, 255, 16), (2, 254, 16), (2, 253, 16)]
    codes[:, 10] = (codes[:, 10] + 1) % 16
    changed = [
        ((a - b).abs().amax((0, 2)) > 0).nonzero().flatten().tolist()
        for a, b in zip(base, ahead(target, states, codes), strict=True)
    ]
    assert changed == [[10], [9, 10], [8, 9, 10]]  # from state i, n further, with codes i to i + n - 1


def test_trains_a_bundle_that_draws(scripts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import build_bundle
    import train_head
    import train_target
    import train_vq
    from common import load_checkpoint

    from lantern_hf import LanternPipeline

    data = tmp_path / "data.npz"
    draw_data(data)
    common = {"data": data, "styles": STYLES, "batch_size": 2, "seed": 0, "bf16": False}
    vq = Namespace(
        **common, out=tmp_path / "vq", init=None, rate=0.5, num_codes=32, channels=[8, 8, 16], steps=3, lr=1e-3
    )
    train_vq.train(vq)
    target: dict = {"vq": vq.out, "out": tmp_path / "target", "num_codes": 32, "layers": 2, "hidden": 32, "lr": 1e-3}
    target |= {
        "corruption": 0.3,
        "blind": 0.0,
        "only": None,
        "own": 0.0,
        "first": 1.0,
        "ahead": 0.5,
        "save_every": 2,
        "compile": False,
    }
    train_target.train(Namespace(**common, **target, init=None, steps=2))
    train_target.train(Namespace(**common, **target, init=None, steps=4))  # goes on from step 2
    steps = (tmp_path / "target" / "log.jsonl").read_text().splitlines()
    assert len([line for line in steps if '"nll"' in line]) == 2
    with pytest.raises(ValueError, match=r"--ahead 0\.0: .* made with it; go on as it began"):
        train_target.train(Namespace(**common, **target | {"ahead": 0.0}, init=None, steps=6))
    blind = target | {"out": tmp_path / "blind", "blind": 0.5, "only": STYLES[1:], "own": 1.0, "first": 4.0}
    blind |= {"ahead": 0.0, "lr": 0.0}
    train_target.train(Namespace(**common, **blind, init=tmp_path / "target" / "checkpoint.pt", steps=2))
    first, started = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("target", "blind"))
    assert all(torch.equal(value, started["model"][name]) for name, value in first["model"].items())
    head: dict = {"vq": vq.out, "target": tmp_path / "target", "out": tmp_path / "head0"}
    head |= {"own_draws": 0, "mixed_draws": 0, "init_head": None}
    few = "--steps 2 --warmup-steps 1 --batch-size 2 --unroll-steps 1 --eval-sequences 2 --mixed-precision no"
    train_head.main(Namespace(**common, **head), [*few.split(), "--head-intermediate", "48"])
    head |= {"out": tmp_path / "head", "own_draws": 2, "mixed_draws": 1, "init_head": tmp_path / "head0"}
    train_head.main(Namespace(**common, **head), few.split())
    own = [json.loads(line) for line in (tmp_path / "head-inputs" / "sequences.jsonl").read_text().splitlines()[-3:]]
    assert all(row["prompt"].startswith("square number") and len(row["tokens"]) == 256 for row in own)
    assert len(own[-1]["prompt"].split(",")[0].split()) == 4  # two words of one caption, two of another
    bundle: dict = {"vq": vq.out, "vq_before": [], "target": target["out"], "target_before": []}
    bundle |= {"head": tmp_path / "head", "head_before": [tmp_path / "head0"]}
    build_bundle.main(
        Namespace(
            **bundle,
            out=tmp_path / "bundle",
            quality=None,
            benchmark=None,
            guidance=2.0,
            top_k=0,
            tree="narrow_8",
            lam=3.0,
            neighbors=12,
            pictures=40,
        )
    )
    assert "MB" in capsys.readouterr().out
    pipeline = LanternPipeline.from_pretrained(tmp_path / "bundle")
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline("square number 3", generator=None)
    assert output.images[0].size == (64, 64)
    assert pipeline.draft_head.neighbors.k == 12


def test_the_held_out_split_is_by_concept(scripts: None, tmp_path: Path) -> None:
    from emoji_data import load_emoji

    draw_data(tmp_path / "data.npz")
    emoji = load_emoji(tmp_path / "data.npz")
    held_out = {str(caption) for caption in emoji.captions[emoji.held_out]}
    assert held_out
    assert not held_out & {str(caption) for caption in emoji.captions[~emoji.held_out]}
    assert set(load_emoji(tmp_path / "data.npz", ["noto"]).styles) == {"noto"}
