"""Training of every family that draws: prompts, structure and what the head is shown are those of decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import tiny_head
from family_matrix import FAMILIES, Family
from tiny import STEPS
from torch import Tensor
from training_families import BY_NAME, PUPILS, Pupil, any_image, batch_of, every_pupil

from lantern_hf import DraftTree, LanternConfig, LanternPipeline, image_prompts, lantern_generate
from lantern_hf.candidates import LanternCandidateGenerator
from lantern_hf.models.vq import encode_pixels
from lantern_hf.training import (
    ConditionedSequences,
    DistilConfig,
    DraftObjective,
    FeatureCache,
    PipelineConditioner,
    TrainingConfig,
    collate,
    draft_passes,
    forecast_passes,
    read_rows,
    self_distil,
    target_features,
    train_head,
)
from lantern_hf.training.binding import bound_adapter, check_structure
from lantern_hf.training.features import both_streams
from lantern_hf.training.runtime import seed_of

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


# ---- what the head is shown


@every_family
@torch.no_grad()
def test_features_are_those_of_the_stock_forward(family: Family) -> None:
    model = family.make("sdpa")
    inputs = family.inputs(model, 2, False)
    batch = collate([row | {"tokens": torch.zeros(1)} for row in family.adapter(model, inputs).rows_of_call(inputs)])
    adapter = bound_adapter(model, batch.prompt, family.options)
    columns = torch.randint(adapter.num_codes, (2, 9), generator=torch.Generator().manual_seed(1))
    tokens = adapter.token_ids(columns)
    batch = type(batch)(batch.prompt, tokens, torch.ones_like(tokens, dtype=torch.bool))
    features = target_features(adapter, batch)
    expected = family.forward(model, inputs, tokens)[:, :-1]
    torch.testing.assert_close(adapter.logits(features.next_hidden[:, features.start :]), expected, atol=1e-4, rtol=0)


class Watching(LanternCandidateGenerator):
    """Notes the head's output at every root, with how many tokens each row had."""

    def _grow(self, sequences: Any, features: Tensor, *args: Any) -> Any:
        self.seen.append((list(sequences.lengths), features.clone()))
        return super()._grow(sequences, features, *args)


@every_family
@pytest.mark.parametrize("guided", [False, True])
@torch.no_grad()
def test_training_and_decoding_show_the_head_the_same(family: Family, guided: bool) -> None:
    """The off-by-one test, in a real generation: entry t of training is the root behind token t."""
    model = family.make("sdpa")
    inputs, head = family.inputs(model, 2, guided), tiny_head(model)
    scale = inputs.get("guidance_scale")
    generator = Watching(
        head, model, "chain_5", adapter=family.adapter(model, inputs), do_sample=False, guidance_scale=scale
    )
    generator.seen = []
    sequences = model.generate(
        **inputs,
        custom_generate=lantern_generate,
        assistant=generator,
        lantern_config=LanternConfig.strict("chain_5"),
        target_options=family.options,
        max_new_tokens=family.new_tokens,
        do_sample=False,
    )
    prompts = family.adapter(model, inputs).rows_of_call(inputs)
    tokens = sequences[:, inputs["input_ids"].shape[1] :]
    batch = collate([row | {"tokens": own} for row, own in zip(prompts, tokens, strict=True)])
    read = both_streams(bound_adapter(model, batch.prompt, family.options), batch) if guided else batch
    features = target_features(bound_adapter(model, read.prompt, family.options), read)
    (trained_on,) = draft_passes(head, features)
    start, compared = inputs["input_ids"].shape[1], 0
    for lengths, shown in generator.seen:
        for stream, found in enumerate(shown):
            entry = lengths[stream % 2] - start - 1
            if entry < tokens.shape[1] - 1:
                torch.testing.assert_close(trained_on[stream, entry], found, atol=1e-4, rtol=1e-4)
                compared += 1
    assert compared >= 4


# ---- prompts


@every_pupil
@pytest.mark.parametrize("guided", [False, True])
def test_prompts_are_those_of_image_prompts(pupil: Pupil, guided: bool) -> None:
    target = pupil.make()
    conditioner = pupil.conditioner(target)
    if guided and pupil.name == "glm_image":
        with pytest.raises(ValueError, match="decoded without guidance"):
            conditioner.check(3.0)
        return
    conditioner.check(3.0 if guided else 1.0)
    scale = 3.0 if guided else None
    expected = image_prompts(target, pupil.processor(), pupil.prompts, guidance_scale=scale, **pupil.wish)
    assert conditioner.num_tokens == expected.pop("max_new_tokens") == pupil.tokens
    batch = collate([row | {"tokens": torch.zeros(1)} for row in conditioner.encode_prompts(pupil.rows)])
    adapter = bound_adapter(target, batch.prompt)
    found = adapter.call_of_rows(batch.prompt)
    if guided:
        ids, mask = adapter.blank(batch.prompt["input_ids"], batch.prompt["attention_mask"])
        mask = torch.ones_like(ids) if mask is None else mask
        if "negative_prompt_ids" in expected:  # Janus makes its own of the prompt
            own = expected.get("negative_prompt_attention_mask", torch.ones_like(ids))
            assert torch.equal(ids[mask.bool()], expected["negative_prompt_ids"][own.bool()])
    for name in found:
        value = expected[name]
        assert torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value, name
    assert {"negative_prompt_ids", "negative_prompt_attention_mask", "guidance_scale"} >= expected.keys() - found.keys()


def test_rows_may_have_sizes_of_their_own() -> None:
    for name, sizes, counts in (
        ("emu3", ((24, 32), (32, 16)), (18, 4 * 3 + 3)),
        ("lumina", ((8, 12), (8, 8)), (29, 4 * 5 + 1)),
        ("glm_image", ((64, 64), (64, 96)), (261, 6 + 13 * 19 + 1)),
    ):
        pupil = BY_NAME[name]
        conditioner = pupil.conditioner()
        rows = [{"prompt": pupil.prompts[0], "height": height, "width": width} for height, width in sizes]
        assert tuple(conditioner.count(row) for row in rows) == counts
        tokens = torch.nn.utils.rnn.pad_sequence(
            [any_image(pupil.conditioner(conditioner.target, height=h, width=w), 1)[0] for h, w in sizes], True
        )
        batch, adapter = batch_of(conditioner, rows, tokens)
        mask = torch.arange(tokens.shape[1]) < torch.tensor(counts)[:, None]
        batch = type(batch)(batch.prompt, tokens, mask)
        check_structure(adapter, batch)
        grids = [tuple(image.shape) for row in range(2) for image in adapter.image_codes(tokens)[row]]
        assert grids == [tuple(size) for size in adapter.image_sizes(batch.prompt["input_ids"])]


# ---- images


@pytest.mark.parametrize("pupil", PUPILS[:4], ids=lambda pupil: pupil.name)
@torch.no_grad()
def test_images_become_the_tokens_that_decoding_would_give(pupil: Pupil) -> None:
    target = pupil.make()
    conditioner = pupil.conditioner(target)
    width, height = pupil.size
    rng = np.random.default_rng(0)
    pictures = [PIL.Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)) for _ in range(2)]
    tokens = conditioner.encode_images(pictures)
    assert tokens.shape == (2, pupil.tokens)
    batch, adapter = batch_of(conditioner, pupil.rows, tokens)
    check_structure(adapter, batch)
    codes = torch.stack([image for (image,) in adapter.image_codes(tokens)])
    assert codes.unique().numel() > 1
    pixels = torch.stack([torch.from_numpy(np.array(one)) for one in pictures]).permute(0, 3, 1, 2) / 127.5 - 1
    if pupil.name == "anole":
        assert torch.equal(tokens, target.get_image_tokens(pixels))
    elif pupil.name == "lumina":
        assert torch.equal(codes, encode_pixels(pupil.decoder(target), pixels))
    else:
        own = pupil.processor().image_processor
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (own.image_mean, own.image_std))
        pixels = ((pixels + 1) / 2 - mean) / deviation
        if pupil.name == "emu3":  # rows and their ends, as transformers lays out an image that is shown
            shown = target.model.get_image_tokens(pixels, torch.tensor([[height, width]] * 2)).view(2, -1)
            assert torch.equal(tokens[:, : shown.shape[1]], shown)
        else:
            assert torch.equal(tokens, target.model.vqmodel.encode(pixels).image_tokens.view(2, -1))


def test_images_that_cannot_be_read_are_refused() -> None:
    picture = [PIL.Image.new("RGB", (8, 8))]
    with pytest.raises(ValueError, match="as a small and a large grid of codes is not published"):
        BY_NAME["glm_image"].conditioner().encode_images(picture)
    lumina = BY_NAME["lumina"]
    bare = type(lumina.conditioner())(lumina.make(), lumina.processor(), **lumina.wish)
    with pytest.raises(ValueError, match="`vq_model` is needed"):
        bare.encode_images(picture)


# ---- structure


@pytest.mark.parametrize("name", ["emu3", "lumina", "glm_image", "anole"])
@torch.no_grad()
def test_only_what_is_drawn_is_learnt_and_only_over_what_may_come(name: str) -> None:
    pupil = BY_NAME[name]
    conditioner = pupil.conditioner()
    tokens = any_image(conditioner, 2)
    batch, adapter = batch_of(conditioner, pupil.rows, tokens)
    features = target_features(adapter, batch)
    forced = conditioner._layout(conditioner.size).forced[1:] >= 0
    assert torch.equal(features.drawn, features.learnt & ~forced)
    assert bool(features.learnt.all())
    head = tiny_head(conditioner.target)
    rows = DraftObjective(head).eval()(features, adapter)
    p, q = (
        adapter.logits(states)[..., : adapter.num_codes].softmax(-1)
        for states in (features.next_hidden[:, features.start :], next(draft_passes(head, features)))
    )
    overlap, entropy = torch.minimum(p, q).sum(-1), -(p * q.log()).sum(-1)
    for found, values in ((rows["overlap"], overlap), (rows["distribution_loss"], entropy)):
        torch.testing.assert_close(found, values[:, ~forced].mean(1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_forecast_takes_what_must_come_for_free() -> None:
    """A tree of one node: its share is min(1, q / p) where a code is drawn, and 1 where a row or the image ends."""
    pupil = BY_NAME["emu3"]
    conditioner = pupil.conditioner()
    batch, adapter = batch_of(conditioner, pupil.rows, any_image(conditioner, 2))
    features, head = target_features(adapter, batch), tiny_head(conditioner.target)
    predicted = forecast_passes(head, features, adapter, batch, DraftTree.from_choices([[0]]))
    p, q = (
        adapter.logits(states)[..., : adapter.num_codes].softmax(-1)
        for states in (features.next_hidden[:, features.start :], next(draft_passes(head, features)))
    )
    columns = adapter.columns_of(batch.tokens[:, 1:])
    at = columns.clamp_max(adapter.num_codes - 1)[..., None]
    drawn = (q.gather(-1, at) / p.gather(-1, at)).clamp_max(1)[..., 0]
    share = torch.where(columns < adapter.num_codes, drawn, 1.0)
    assert int((columns >= adapter.num_codes).sum()) == 2 * 6
    count = share.shape[1]
    for row in range(2):
        root = [1.0] + [0.0] * (count + 1)
        for index in range(count):
            root[index + 1] += root[index] * (1 - float(share[row, index]))
            root[index + 2] += root[index] * float(share[row, index])
        assert float(predicted["passes"][row]) == pytest.approx(sum(root[:count]), rel=1e-4)


@pytest.mark.parametrize("name", ["emu3", "lumina", "glm_image"])
def test_tokens_of_another_size_are_refused(name: str, tmp_path: Path) -> None:
    pupil = BY_NAME[name]
    conditioner = pupil.conditioner()
    tokens = any_image(conditioner, 2)
    rows = [row | {"tokens": own.roll(1)} for row, own in zip(pupil.rows, tokens, strict=True)]
    data = ConditionedSequences(rows, conditioner)
    with pytest.raises(ValueError, match="Give the `height` and `width` that the sequences were made with"):
        train_head(conditioner.target, data, TrainingConfig(steps=1, **STEPS), output_dir=tmp_path / "head")
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("name", ["emu3", "janus", "lumina"])
@pytest.mark.parametrize("settings", [{"guidance_dropout": 0.5}, {"guidance_scale": 2.0}])
def test_training_on_cached_features_is_training_on_the_target(name: str, settings: dict, tmp_path: Path) -> None:
    pupil = BY_NAME[name]
    conditioner = pupil.conditioner()
    rows = [row | {"tokens": own} for row, own in zip(pupil.rows * 2, any_image(conditioner, 4), strict=True)]
    data, config = ConditionedSequences(rows, conditioner), TrainingConfig(steps=2, **STEPS, **settings)
    online = train_head(conditioner.target, data, config).state_dict()
    cached = train_head(conditioner.target, data, config, feature_cache=FeatureCache(tmp_path / "cache")).state_dict()
    for key, value in cached.items():
        torch.testing.assert_close(value, online[key], atol=1e-4, rtol=1e-3)


# ---- the target's own sequences


@every_pupil
def test_distilled_sequences_are_what_the_pipeline_draws(pupil: Pupil, tmp_path: Path) -> None:
    target = pupil.make()
    pipe = LanternPipeline.from_target(target, pupil.processor(), vq_model=pupil.decoder(target), top_k=12)
    pipe.enable_progress(False)
    conditioner = PipelineConditioner(pipe, **pupil.wish)
    scale = pipe.config.guidance_scale
    assert (scale == 1.0) == (pupil.name == "glm_image")
    config = DistilConfig(guidance_scale=scale, top_k=12, batch_size=2)
    self_distil(conditioner, pupil.rows, tmp_path, config)
    rows = read_rows(tmp_path)
    assert [row["prompt"] for row in rows] == list(pupil.prompts)
    assert [len(row["tokens"]) for row in rows] == [pupil.tokens] * 2
    assert [{side: row[side] for side in pupil.wish} for row in rows] == [pupil.wish] * 2
    batch, adapter = batch_of(conditioner, rows, torch.stack([row["tokens"].long() for row in rows]))
    check_structure(adapter, batch)
    seeds = [torch.Generator().manual_seed(seed_of(0, row, "sequence")) for row in range(2)]
    drawn = pipe(list(pupil.prompts), generator=seeds, output_type="latent", lantern_config=None, **pupil.wish)
    assert torch.equal(torch.stack([image for (image,) in adapter.image_codes(batch.tokens)]), drawn.codes)
    # Sizes travel with the rows, so that whoever trains need not say them again.
    again = ConditionedSequences(rows, pupil.conditioner(target, height=None, width=None))
    head = train_head(target, again, TrainingConfig(steps=1, guidance_dropout=0.5, **STEPS))
    assert head.target is target
