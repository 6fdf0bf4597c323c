"""The embedded model: what ships, what it weighs, and that LANTERN++ saves passes on it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image

from lantern_hf import LanternConfig, LanternPipeline, embedded_pipeline
from lantern_hf.assets import embedded_model_path

PROMPTS = ["tropical fish", "red heart", "grinning face", "keycap 7"]


@pytest.fixture(scope="module")
def pipeline() -> LanternPipeline:
    pipeline = embedded_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))]


def test_the_bundle_is_complete_and_small() -> None:
    folder = embedded_model_path()
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 20e6
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".md"}
    assert (folder / "draft_head" / "neighbors.safetensors").exists()
    card = (folder / "README.md").read_text()
    assert "Apache-2.0" in card
    assert "Not measured yet" not in card


def strings(value: Any) -> Iterator[str]:
    """Every string within a JSON value."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(part)


def test_no_config_names_a_place_on_the_machine_that_built_it() -> None:
    configs = [*embedded_model_path().parent.rglob("*config.json"), *embedded_model_path().rglob("*index.json")]
    assert len(configs) >= 6
    for file in configs:
        values = json.loads(file.read_text())
        assert not [text for text in strings(values) if re.match(r"/|~|[A-Za-z]:\\|file:", text)], file


def test_strict_and_relaxed_decoding_save_passes(pipeline: LanternPipeline) -> None:
    passes = {}
    for name, config in {
        "plain": None,
        "strict": LanternConfig.strict("wide_57"),
        "relaxed": LanternConfig(tree="wide_57", lam=3.0, neighborhood_size=10),
    }.items():
        output = pipeline(
            PROMPTS, guidance_scale=3.0, top_k=0, generator=generators(), lantern_config=config, output_type="latent"
        )
        assert output.codes.shape == (len(PROMPTS), 16, 16)
        passes[name] = output.stats.tokens_per_pass
    assert passes["plain"] == 1
    assert passes["strict"] > 2
    assert passes["relaxed"] > passes["strict"]


def test_draws_the_same_picture_again(pipeline: LanternPipeline) -> None:
    pictures = [pipeline("tropical fish", generator=torch.Generator().manual_seed(3)).images[0] for _ in range(2)]
    assert isinstance(pictures[0], Image.Image)
    assert pictures[0].size == (64, 64)
    assert pictures[0].tobytes() == pictures[1].tobytes()


def test_strict_greedy_equals_the_models_own_generate() -> None:
    pipeline = embedded_pipeline(dtype=torch.float32)  # in half precision near-ties fall either way
    pipeline.set_progress_bar_config(disable=True)
    inputs = dict(guidance_scale=3.0, do_sample=False, output_type="latent")
    drafted = pipeline("red heart", lantern_config=LanternConfig.strict("narrow_8"), **inputs)
    plain = pipeline("red heart", lantern_config=None, **inputs)
    assert torch.equal(drafted.codes, plain.codes)
    assert drafted.stats.passes < plain.stats.passes


def test_the_card_names_what_the_config_holds(pipeline: LanternPipeline) -> None:
    config = LanternConfig.resolve(pipeline.draft_head.config.lantern_config)
    assert config.lam == 3.0
    index = json.loads((embedded_model_path() / "model_index.json").read_text())
    assert index["_class_name"] == "LanternPipeline"
