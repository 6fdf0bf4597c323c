"""GLM-Image in diffusers' pipeline, which calls `generate` itself; texts to arguments; the example."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from conftest import NUM_CODES, tiny_head
from PIL import Image
from tiny_families import GLM_EOI, glm_image_pipeline, glm_image_processor, tiny_glm_image

from lantern_hf import LanternConfig, attach, decode_images, image_prompts
from lantern_hf.targets import adapter_for


def test_diffusers_pipeline() -> None:
    """The real pipeline calls `generate` by itself: the very same picture where nothing is left to chance."""
    prior = tiny_glm_image()
    pipe = glm_image_pipeline(prior)
    kwargs = {"height": 32, "width": 64, "num_inference_steps": 2}
    prior.generation_config.top_k = 1
    expected = pipe("a red fox", generator=torch.Generator().manual_seed(0), **kwargs).images[0]
    attach(prior, tiny_head(prior), LanternConfig.strict("chain_5"), default_on=True)
    image = pipe("a red fox", generator=torch.Generator().manual_seed(0), **kwargs).images[0]
    assert image.size == (64, 32)
    assert image.tobytes() == expected.tobytes()


def test_diffusers_pipeline_draws_its_seed() -> None:
    """Relaxed, several prompts in a batch; the pipeline seeds the global generator, which drives the draws."""
    prior = tiny_glm_image()
    pipe = glm_image_pipeline(prior)
    attach(prior, tiny_head(prior), LanternConfig("chain_5", 5, lam=4.0), default_on=True)
    texts = ["a red fox", "a blue bird what"]
    first, again, other = (
        pipe.generate_prior_tokens(texts, height=32, width=64, generator=torch.Generator().manual_seed(seed))[0]
        for seed in (0, 0, 1)
    )
    assert first.shape == (2, 8)  # a large grid of 1 x 2, each code four times
    assert int(first.max()) < NUM_CODES
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of examples/ on a saved tiny pipeline: real files, and a PNG of the size asked for."""
    prior = tiny_glm_image()
    tiny_head(prior).save_pretrained(tmp_path / "head")
    glm_image_pipeline(prior).save_pretrained(tmp_path / "model")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    monkeypatch.delitem(sys.modules, "glm_image", raising=False)
    import glm_image

    command = ["a red fox", "--model", str(tmp_path / "model"), "--head", str(tmp_path / "head"), "--dtype", "float32"]
    command += ["--height", "32", "--width", "64", "--steps", "2", "--neighborhood-size", "5"]
    file = glm_image.main([*command, "--out", str(tmp_path / "fox.png")])
    with Image.open(file) as picture:
        assert picture.size == (64, 32)


def test_texts_become_arguments() -> None:
    """As the pipeline makes them; the codes of the large grid come back, pixels do not."""
    model = tiny_glm_image()
    inputs = image_prompts(model, glm_image_processor(), ["a red fox", "this is"], height=32, width=64)
    assert inputs["image_grid_thw"].tolist() == [[1, 1, 2], [1, 11, 22]] * 2
    assert inputs["max_new_tokens"] == 2 + 11 * 22 + 1
    assert inputs["attention_mask"].sum(1).tolist() == [12, 11]
    attach(model, tiny_head(model), LanternConfig.strict("chain_5"), default_on=True)
    sequences = model.generate(**inputs)
    assert (sequences[:, -1] == GLM_EOI).all()
    adapter = adapter_for(model, inputs["input_ids"])
    adapter.read_call(inputs["input_ids"], inputs)
    codes = adapter.image_codes(sequences[:, inputs["input_ids"].shape[1] :])
    assert [row[0].shape for row in codes] == [(1, 2), (1, 2)]
    with pytest.raises(ValueError, match="size of the grids is not known"):
        decode_images(model, inputs["input_ids"], sequences)
    with pytest.raises(ValueError, match="decoded without guidance"):
        image_prompts(model, glm_image_processor(), "a red fox", guidance_scale=2.0)
    with pytest.raises(ValueError, match="one size for all prompts"):
        image_prompts(model, glm_image_processor(), ["a", "is"], height=[32, 64])
