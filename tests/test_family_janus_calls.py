"""Janus: how its images are asked for: arguments, streams, refusals, the example."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_head
from PIL import Image
from test_sync import Waits, counted
from tiny_families import BOI, BOS, NUM_CODES, PAD, SIDE, janus_processor, janus_prompts, tiny_janus
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from lantern_hf import LanternConfig, attach, decode_images, detach, image_prompts, lantern_generate
from lantern_hf.hub import generate_with_head

TOKENS = SIDE * SIDE


def test_positional_arguments_and_a_config_object() -> None:
    model = tiny_janus()
    inputs = janus_prompts(2)
    expected = model.generate(**inputs, generation_mode="image", guidance_scale=3.0)
    attach(model, tiny_head(model), LanternConfig.strict(), default_on=True)
    config = GenerationConfig(
        guidance_scale=3.0, max_new_tokens=7
    )  # Janus' images have their length, whatever is asked
    output = model.generate(
        inputs["input_ids"], inputs["attention_mask"], generation_config=config, generation_mode="image"
    )
    assert torch.equal(output, expected)
    assert (config.max_new_tokens, config.guidance_scale) == (7, 3.0)
    model.generation_config.guidance_scale = 3.0  # as published checkpoints have it
    assert torch.equal(model.generate(**inputs, generation_mode="image"), expected)
    detach(model)
    assert torch.equal(model.generate(**inputs, generation_mode="image"), expected)


def test_the_common_generate_does_the_same() -> None:
    """Without attaching; the prompt then stands before the codes, as everywhere in transformers."""
    model = tiny_janus()
    inputs = janus_prompts(2)
    expected = model.generate(**inputs, generation_mode="image", guidance_scale=3.0)
    output = GenerationMixin.generate(
        model,
        **inputs,
        custom_generate=lantern_generate,
        assistant=tiny_head(model),
        lantern_config=LanternConfig.strict(),
        target_options={"generation_mode": "image"},
        guidance_scale=3.0,
        max_new_tokens=TOKENS,
    )
    assert torch.equal(output[:, inputs["input_ids"].shape[1] :], expected)


def test_a_published_head_makes_images_too() -> None:
    """What `custom_generate/generate.py` of a published head calls, for a model that nobody attached."""
    model = tiny_janus()
    inputs = janus_prompts(2)
    expected = model.generate(**inputs, generation_mode="image", guidance_scale=3.0)
    call = {"generation_mode": "image", "guidance_scale": 3.0, "lantern_config": LanternConfig.strict()}
    assert torch.equal(generate_with_head(model, **inputs, **call, assistant=tiny_head(model)), expected)


def test_details_on_request() -> None:
    model = attach(tiny_janus())
    output = model.generate(
        **janus_prompts(2),
        generation_mode="image",
        assistant=tiny_head(model),
        lantern_config=LanternConfig.strict(),
        return_dict_in_generate=True,
        output_scores=True,
        output_hidden_states=True,
        do_sample=True,
        top_k=5,
    )
    assert len(output.scores) == len(output.hidden_states) == TOKENS
    assert output.scores[0].shape == (2, NUM_CODES)
    assert all(int((scores > -1e30).sum(1).max()) <= 5 for scores in output.scores)
    assert output.sequences.shape == (2, TOKENS)


class Columns:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.columns: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.columns.append(value)

    def end(self) -> None:
        self.ended = True


def test_streams_codes() -> None:
    model = attach(tiny_janus())
    streamer = Columns()
    draft = {"assistant": tiny_head(model), "lantern_config": LanternConfig.strict()}
    output = model.generate(**janus_prompts(2), generation_mode="image", streamer=streamer, **draft)
    assert streamer.ended
    assert torch.equal(torch.stack(streamer.columns[1:], dim=1), output)


@pytest.mark.parametrize("do_sample", [True, False])
def test_two_waits_a_round_at_most(do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_janus()
    attach(model, tiny_head(model), LanternConfig("wide_57", 5, lam=3.0), default_on=True)
    rounds: list[list[str]] = []
    inputs = janus_prompts(3)

    watched = SimpleNamespace(model=SimpleNamespace(base_model=model.model.language_model))
    with monkeypatch.context() as patch:
        patch.setattr("lantern_hf.session.asking_is_free", lambda device: False)
        with counted(patch, watched) as waits:  # type: ignore[arg-type]
            assert isinstance(waits, Waits)

            def on_round(session: Any) -> None:
                rounds.append(list(waits.names))
                waits.names.clear()

            model.generate(**inputs, generation_mode="image", do_sample=do_sample, on_round=on_round)
    assert len(rounds) > 2
    assert max(len(names) for names in rounds[1:]) <= 2, rounds


def test_refusals() -> None:
    model = tiny_janus()
    attach(model, tiny_head(model), LanternConfig.strict(), default_on=True)
    inputs = janus_prompts(1)
    with pytest.raises(ValueError, match="reads prompts from `input_ids`"):
        model.generate(inputs_embeds=torch.zeros(1, 2, 32), generation_mode="image")
    with pytest.raises(ValueError, match="`generation_mode` must be one of text, image, got 'video'"):
        model.generate(**inputs, generation_mode="video")
    with pytest.raises(ValueError, match="`num_beams` must be 1"):
        model.generate(**inputs, generation_mode="image", num_beams=2)
    model.generation_config.generation_kwargs = {}
    with pytest.raises(ValueError, match="`boi_token_id` of the generation config is None"):
        model.generate(**inputs, generation_mode="image")
    assert torch.equal(inputs["input_ids"][:, [0, -1]], torch.tensor([[BOS, BOI]]))
    assert PAD == 0


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of examples/ on a saved tiny model: real files, real processor, PNGs."""
    model = tiny_janus()
    tiny_head(model).save_pretrained(tmp_path / "head")
    model.save_pretrained(tmp_path / "model")
    janus_processor().save_pretrained(tmp_path / "model")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    monkeypatch.delitem(sys.modules, "janus", raising=False)
    import janus

    command = ["a red fox", "--model", str(tmp_path / "model"), "--head", str(tmp_path / "head"), "--images", "2"]
    files = janus.main([*command, "--neighborhood-size", "5", "--out", str(tmp_path / "fox.png")])
    assert [file.name for file in files] == ["fox-0.png", "fox-1.png"]
    for file in files:
        with Image.open(file) as picture:
            assert picture.size == (16, 16)


def test_texts_become_arguments_and_codes_pictures() -> None:
    model = tiny_janus()
    attach(model, tiny_head(model), LanternConfig("chain_5", 5, lam=4.0), default_on=True)
    for scale in (None, 3.0):
        inputs = image_prompts(model, janus_processor(), ["a red fox", "a bird this is"], guidance_scale=scale)
        assert (inputs["guidance_scale"], inputs["max_new_tokens"]) == (scale or 1.0, TOKENS)
        codes = model.generate(**inputs, do_sample=True)
        pictures = decode_images(model, inputs["input_ids"], codes)
        assert [[picture.size for picture in row] for row in pictures] == [[(16, 16)]] * 2
    with pytest.raises(ValueError, match="Janus' images are 16 x 16 pixels, not 32"):
        image_prompts(model, janus_processor(), "a red fox", height=[32], width=16)
