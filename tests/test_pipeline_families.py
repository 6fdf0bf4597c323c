"""`LanternPipeline` over every family: images of the right size, reproducible, strict, with progress on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import NUM_CODES, tiny_head, tiny_llama
from family_pipelines import BY_NAME, TREE, Drawer, every_drawer, seed
from pipelines import tiny_class_pipeline, tiny_pipeline
from tiny_families import glm_image_processor, tiny_glm_image
from transformers import pipeline

from lantern_hf import LanternConfig, LanternPipeline, NeighborTable, attach
from lantern_hf.targets import adapter_for

STRICT = LanternConfig.strict("chain_5")


@every_drawer
def test_prompts_become_images(drawer: Drawer) -> None:
    pipe = drawer.pipe()
    output = drawer.draw(pipe, num_images_per_prompt=2)
    assert [image.size for image in output.images] == [drawer.size] * 4
    assert output.codes.shape == (4, *drawer.grid)
    assert 0 <= int(output.codes.min()) <= int(output.codes.max()) < NUM_CODES
    assert output.stats.passes < max(output.stats.new_tokens)
    assert sum(output.stats.accepted_lengths[1:]) > 0
    assert pipe.draft_head.neighbors.k >= TREE.neighborhood_size  # made over the codebook, and saved with the head
    metric = "cosine" if drawer.name == "janus" else "l2"
    assert pipe.draft_head.neighbors.metric == metric
    again = drawer.draw(pipe, num_images_per_prompt=2, return_dict=False)
    assert [image.tobytes() for image in again[0]] == [image.tobytes() for image in output.images]
    assert torch.equal(again[2], output.codes)


@every_drawer
def test_outputs_in_every_form_are_one_image(drawer: Drawer) -> None:
    pipe = drawer.pipe()
    pil, array, tensor, latent = (
        drawer.draw(pipe, drawer.prompts[0], output_type=kind) for kind in ("pil", "np", "pt", "latent")
    )
    width, height = drawer.size
    assert array.images.shape == (1, height, width, 3)
    assert tensor.images.shape == (1, 3, height, width)
    assert torch.equal(latent.images, pil.codes)
    assert np.abs(np.asarray(pil.images[0]) - array.images[0] * 255).max() <= 0.51
    assert np.array_equal(tensor.images.permute(0, 2, 3, 1).float().numpy(), array.images)


@every_drawer
def test_an_image_depends_on_its_prompt_and_generator_alone(drawer: Drawer) -> None:
    pipe = drawer.pipe()
    both = drawer.draw(pipe, generator=[seed(4), seed(9)], negative_prompt=drawer.prompts[::-1])
    for row in range(2):
        wish = {"generator": [seed((4, 9)[row])], "negative_prompt": drawer.prompts[1 - row]}
        assert torch.equal(drawer.draw(pipe, drawer.prompts[row], **wish).codes[0], both.codes[row])
    plain = drawer.draw(pipe, generator=[seed(4), seed(9)])
    assert not torch.equal(plain.codes, both.codes)


@every_drawer
def test_greedy_strict_is_plain_greedy(drawer: Drawer) -> None:
    pipe, bare = drawer.pipe(), drawer.pipe(head=None)
    greedy: dict[str, Any] = {"do_sample": False, "output_type": "latent"}
    strict = drawer.draw(pipe, lantern_config=STRICT, **greedy)
    plain = drawer.draw(pipe, lantern_config=None, **greedy)
    assert torch.equal(strict.codes, plain.codes)
    assert torch.equal(drawer.draw(bare, lantern_config="default", **greedy).codes, plain.codes)
    assert plain.stats.passes == max(plain.stats.new_tokens) - 1
    unguided = drawer.draw(pipe, lantern_config=None, guidance_scale=1.0, **greedy)
    assert not torch.equal(unguided.codes, plain.codes)
    assert torch.equal(drawer.draw(pipe, lantern_config=None, top_k=1, output_type="latent").codes, plain.codes)
    with pytest.raises(ValueError, match="no draft head"):
        drawer.draw(bare)


@every_drawer
def test_both_kinds_of_pipeline_draw_the_same(drawer: Drawer) -> None:
    model = drawer.make()
    head = tiny_head(model)
    ours = drawer.pipe(model, head)
    expected = drawer.draw(ours, generator=[seed(2), seed(3)], top_k=9)
    processor = drawer.processor()
    kind = "tokenizer" if ours.processor is None else "processor"
    parts = {kind: processor} | ({} if ours.vq_model is None else {"vq_model": ours.vq_model})
    theirs = pipeline("lantern-text-to-image", model=model, assistant=head, device="cpu", **parts)
    images = theirs(list(drawer.prompts), seed=2, top_k=9, lantern_config=TREE, **drawer.wish)
    for image, twin in zip(images, expected.images, strict=True):
        # decoded one by one there and together here, which may round differently
        assert np.abs(np.asarray(image, dtype=int) - np.asarray(twin, dtype=int)).max() <= 1


@every_drawer
def test_an_attached_target_brings_its_head(drawer: Drawer) -> None:
    model = drawer.make()
    head = tiny_head(model)
    expected = drawer.draw(drawer.pipe(model, head))
    head.neighbors = None
    attach(model, head, TREE, default_on=True)
    pipe = drawer.pipe(model, None)
    assert pipe.draft_head is head
    assert pipe._resolve_config("default") == TREE
    assert torch.equal(drawer.draw(pipe, lantern_config="default").codes, expected.codes)
    plain = drawer.draw(pipe, lantern_config=None)  # although every other call drafts
    assert plain.stats.passes == max(plain.stats.new_tokens) - 1


@every_drawer
def test_callbacks_see_the_image_grow(drawer: Drawer) -> None:
    pipe, calls = drawer.pipe(), []
    output = drawer.draw(
        pipe,
        callback_on_step_end=lambda *arguments: calls.append(arguments),
        callback_on_step_end_tensor_inputs=["image_tokens", "image"],
    )
    assert [call[:2] for call in calls] == [(pipe, step) for step in range(output.stats.passes)]
    assert calls[-1][2] == sum(output.stats.new_tokens)
    before = torch.full_like(calls[0][3]["image_tokens"], -1)
    for _, _, _, tensors in calls:
        codes = tensors["image_tokens"]
        assert torch.equal(codes[before >= 0], before[before >= 0])
        assert (codes >= 0).sum() >= (before >= 0).sum()
        assert tensors["image"].shape == (2, 3, *drawer.size[::-1])
        before = codes
    assert torch.equal(before.view(2, *drawer.grid), output.codes)
    last = (calls[-1][3]["image"].permute(0, 2, 3, 1).numpy() * 255).round()
    assert np.array_equal(last, np.stack([np.asarray(image) for image in output.images]))


def test_a_batch_may_hold_images_of_several_sizes() -> None:
    drawer, calls = BY_NAME["lumina"], []
    pipe = drawer.pipe()
    wish: dict[str, Any] = {"height": [8, 12], "width": [12, 4], "num_images_per_prompt": 2}
    output = drawer.draw(
        pipe,
        **wish,
        callback_on_step_end=lambda *arguments: calls.append(arguments[3]),
        callback_on_step_end_tensor_inputs=["image_tokens", "image"],
    )
    assert [image.size for image in output.images] == [(12, 8)] * 2 + [(4, 12)] * 2
    assert [tuple(codes.shape) for codes in output.codes] == [(4, 6)] * 2 + [(6, 2)] * 2
    assert calls[-1]["image_tokens"].shape == (4, 24)
    assert (calls[-1]["image_tokens"][2:] >= 0).sum(1).tolist() == [12, 12]
    assert [tuple(image.shape) for image in calls[-1]["image"]] == [(3, 8, 12)] * 2 + [(3, 12, 4)] * 2
    with pytest.raises(ValueError, match=r"`output_type='np'` is one array for all images, which have 2 sizes"):
        drawer.draw(pipe, **wish, output_type="np")
    with pytest.raises(ValueError, match="`height` has 3 values for 2 prompts"):
        drawer.draw(pipe, height=[8, 8, 8], width=8)


def test_the_bar_moves_by_accepted_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    drawer = BY_NAME["emu3"]
    pipe = drawer.pipe()
    drawer.draw(pipe)
    assert "token" not in capsys.readouterr().err
    pipe.set_progress_bar_config(desc="Drawing", mininterval=0)
    pipe.enable_progress()
    output = drawer.draw(pipe)
    shown = capsys.readouterr().err
    assert "Drawing" in shown
    assert f"{sum(output.stats.new_tokens)}/{sum(output.stats.new_tokens)}" in shown
    rows = len(output.stats.new_tokens)  # the bar counts rows that have ended as decoding
    rate = (sum(output.stats.new_tokens) - rows) / (rows * output.stats.passes)
    assert f"{rate:.2f} tokens a pass" in shown
    pipe.enable_progress(False)
    drawer.draw(pipe)
    assert "Drawing" not in capsys.readouterr().err


def test_the_priors_codes_without_their_diffusion_model() -> None:
    """GLM-Image: the codes of the large grid; pictures are refused before any pass, with a way out."""
    prior = tiny_glm_image()
    pipe = LanternPipeline.from_target(prior, glm_image_processor(), tiny_head(prior), lantern_config=TREE)
    pipe.enable_progress(False)
    assert pipe.config.guidance_scale == 1.0
    wish: dict[str, Any] = {"height": 32, "width": 64, "output_type": "latent"}
    seen: list[torch.Tensor] = []
    output = pipe(
        ["a red fox", "this is"],
        generator=[seed(0), seed(1)],
        callback_on_step_end=lambda pipe, step, done, tensors: seen.append(tensors["image_tokens"]),
        **wish,
    )
    assert output.codes.shape == (2, 1, 2)
    assert torch.equal(seen[-1].view(2, 1, 2), output.codes)
    alone = pipe("this is", generator=seed(1), **wish)
    assert torch.equal(alone.codes[0], output.codes[1])
    assert pipe.draft_head.neighbors.metric == "cosine"
    for arguments in ({"output_type": "pil"}, {"callback_on_step_end": print}):
        names = {"callback_on_step_end_tensor_inputs": ["image"]}
        with pytest.raises(ValueError, match="Attach the prior of a diffusers GlmImagePipeline"):
            pipe("a red fox", **(wish | names | arguments))
    with pytest.raises(ValueError, match="takes no `negative_prompt`"):
        pipe("a red fox", negative_prompt="a", **wish)
    with pytest.raises(ValueError, match="decoded without guidance"):
        pipe("a red fox", guidance_scale=2.0, **wish)
    task = pipeline("lantern-text-to-image", model=prior, processor=glm_image_processor(), device="cpu")
    with pytest.raises(ValueError, match="Attach the prior of a diffusers GlmImagePipeline"):
        task("a red fox")


def test_settings_come_from_the_user_the_target_the_family() -> None:
    drawer = BY_NAME["emu3"]
    model = drawer.make()
    assert drawer.pipe(model).config.guidance_scale == 3.0
    assert drawer.pipe(model).config.top_k == 2048
    model.generation_config.update(guidance_scale=2.0, top_k=7, top_p=0.5, temperature=0.25)
    pipe = drawer.pipe(model)
    assert pipe._sampling(None, None, None, None) == {
        "guidance_scale": 2.0,
        "top_k": 7,
        "top_p": 0.5,
        "temperature": 0.25,
    }
    assert pipe._sampling(1, 0, 1.0, 1.0) == {"guidance_scale": 1.0, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    assert drawer.pipe(model, guidance_scale=4.0, top_k=3).config.top_k == 3
    assert tiny_class_pipeline().config.guidance_scale == 7.5


def test_what_cannot_be_drawn_is_refused_before_any_pass() -> None:
    with pytest.raises(ValueError, match="`transformer` is a LlamaForCausalLM, which draws no images"):
        LanternPipeline(tiny_llama())
    anole = BY_NAME["anole"]
    model = anole.make()
    with pytest.raises(TypeError, match="`head` must be a LanternDraftModel"):
        LanternPipeline.from_target(model, anole.processor(), 3)  # type: ignore[arg-type]
    bare = LanternPipeline.from_target(model, anole.processor())
    bare.enable_progress(False)
    assert anole.draw(bare, lantern_config=None, output_type="latent").codes.shape == (2, 4, 4)
    with pytest.raises(ValueError, match="holds no VQ decoder"):
        anole.draw(bare, lantern_config=None)
    with pytest.raises(ValueError, match="need its processor"):
        LanternPipeline.from_target(model, vq_model=anole.decoder(model))("word1")
    with pytest.raises(ValueError, match="draws from `prompt`"):
        anole.pipe()(class_labels=3)
    with pytest.raises(ValueError, match="at least one non-empty text"):
        anole.draw(anole.pipe(), ["word1", " "])
    other = anole.decoder(model)
    other.register_to_config(num_vq_embeddings=32)
    with pytest.raises(ValueError, match="`vq_model` has 32 codes, the target 24"):
        LanternPipeline.from_target(model, anole.processor(), vq_model=other)
    table = NeighborTable.from_codebook(-adapter_for(model).codebook(), 5)
    pipe = anole.pipe(model)
    pipe.draft_head.neighbors = table
    with pytest.raises(ValueError, match="another codebook"):
        anole.draw(pipe)


def test_llamagen_from_its_parts() -> None:
    ours = tiny_pipeline()
    parts = {"text_encoder": ours.text_encoder, "vq_model": ours.vq_model, "guidance_scale": 2.0}
    pipe = LanternPipeline.from_target(ours.transformer, ours.tokenizer, ours.draft_head, **parts)
    pipe.enable_progress(False)
    wish = {"generator": seed(), "lantern_config": STRICT}
    expected = ours(["a red fox", "a bird"], generator=seed(), lantern_config=STRICT)
    assert torch.equal(pipe(["a red fox", "a bird"], **wish).codes, expected.codes)
    with pytest.raises(ValueError, match="LlamaGen takes no `height`"):
        pipe("a bird", height=16)
    with pytest.raises(ValueError, match="takes no `negative_prompt`"):
        pipe("a bird", negative_prompt="a fox")
