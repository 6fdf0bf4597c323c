"""Janus: its own `generate` for images, guidance, text with pictures in it, and everything around a call."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from conftest import NUM_CODES, tiny_head
from helpers import Oracle
from PIL import Image
from tiny_families import BOI, BOS, EOS, IMAGE, PAD, SIDE, janus_processor, janus_prompts, tiny_janus
from torch import Tensor
from transformers import JanusModel

from lantern_hf import TREES, LanternConfig, NeighborTable, attach
from lantern_hf.cache import RaggedCache, new_dynamic_cache
from lantern_hf.targets import adapter_for
from lantern_hf.targets.attention import attention_argument

TOKENS = SIDE * SIDE


def janus_oracle(truth: Tensor, tree: str, codes: int = NUM_CODES) -> Oracle:
    """A generator that mostly proposes what should come."""
    return Oracle(TREES[tree], truth, list(range(codes)), codes, 0.2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", ["image", "text"])
def test_a_tree_pass_equals_plain_passes(mode: str, attention: str) -> None:
    """Two rounds behind a padded, guided prompt, a path kept in between."""
    model = tiny_janus(attention)
    adapter = adapter_for(model, generation_mode=mode)
    tree = TREES["eagle_25"]
    inputs = janus_prompts(2)
    unconditional, _ = adapter.unconditional(inputs["input_ids"], inputs["attention_mask"])
    ids = torch.cat([inputs["input_ids"], unconditional.expand(-1, inputs["input_ids"].shape[1])])
    mask = inputs["attention_mask"].repeat(2, 1)
    random = torch.Generator().manual_seed(0)
    embeds = [model.get_input_embeddings()(ids)]  # what plain passes have read
    with torch.no_grad():
        cache = new_dynamic_cache(model.config.get_text_config())
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        prompt = adapter.prefill(ids, cache, attention_mask=mask, position_ids=positions)
        assert torch.allclose(prompt.embeds, embeds[0])
        ragged = RaggedCache(cache, 4, torch.device("cpu"), ids.shape[1], ~prompt.mask)
        first = positions[:, -1:] + 1
        for path in (tree.paths[0], tree.paths[5]):
            nodes = torch.randint(NUM_CODES, (2, tree.num_nodes), generator=random).repeat(2, 1)
            tree_mask = attention_argument(ragged.tree_mask(tree.mask), attention, torch.float32)
            hidden, _ = adapter.tree_pass(nodes, first + tree.depths, tree_mask, cache)
            for other in tree.paths:
                other = other[other >= 0]
                whole = torch.cat([*embeds, embed_plainly(model, mode, nodes[:, other])], dim=1)
                expected = plain_logits(model, mode, whole, mask)[:, -len(other) :]
                assert torch.allclose(adapter.logits(hidden)[:, other], expected, atol=1e-4)
            path = path[path >= 0][:3]
            ragged.keep(path[None], [len(path)] * 4)
            embeds.append(embed_plainly(model, mode, nodes[:, path]))
            first = first + len(path)


def embed_plainly(model: Any, mode: str, ids: Tensor) -> Tensor:
    """Embeddings of what was generated."""
    return model.prepare_embeddings_for_image_generation(ids) if mode == "image" else model.get_input_embeddings()(ids)


def plain_logits(model: Any, mode: str, embeds: Tensor, mask: Tensor) -> Tensor:
    """Logits of whole sequences, read at once and without a cache."""
    whole = torch.nn.functional.pad(mask, (0, embeds.shape[1] - mask.shape[1]), value=1)
    positions = (whole.cumsum(1) - 1).clamp_min(0)
    hidden = model.model.language_model(inputs_embeds=embeds, attention_mask=whole, position_ids=positions)
    head = model.model.generation_head if mode == "image" else model.lm_head
    return head(hidden.last_hidden_state)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "kwargs", [{}, {"guidance_scale": 2.0, "num_return_sequences": 2, "do_sample": True, "top_k": 1}, {"rows": 3}]
)
def test_equals_its_own_generate(kwargs: dict[str, Any], attention: str) -> None:
    """Token for token, with guidance, for prompts of unequal length and several images a prompt."""
    model = tiny_janus(attention)
    kwargs = dict(kwargs)
    inputs = janus_prompts(kwargs.pop("rows", 2))
    kwargs = {"generation_mode": "image", "do_sample": False} | kwargs
    expected = model.generate(**inputs, **kwargs)
    assert len(expected[0].unique()) > 4
    attach(model)
    for name, tree in (("head", "eagle_25"), ("oracle", "wide_57"), ("oracle", "chain_5")):
        assistant = tiny_head(model) if name == "head" else janus_oracle(expected, tree)
        output = model.generate(
            **inputs,
            **kwargs,
            assistant=assistant,
            lantern_config=LanternConfig.strict(tree),
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, expected), name
        if name == "oracle":
            assert output.stats.tokens_per_pass > 2


def test_guidance_is_optional() -> None:
    """The stock method fails without guidance; here it is left out, which halves the work."""
    model = attach(tiny_janus())
    inputs = janus_prompts(2)
    draft = {"assistant": tiny_head(model), "lantern_config": LanternConfig.strict()}
    output = model.generate(**inputs, generation_mode="image", guidance_scale=1.0, **draft)
    adapter = adapter_for(model, generation_mode="image")
    mask = inputs["attention_mask"]
    embeds = torch.cat([model.get_input_embeddings()(inputs["input_ids"]), adapter.embed(output, output)], dim=1)
    scores = plain_logits(model, "image", embeds, mask)
    start = mask.shape[1]
    assert torch.equal(scores[:, start - 1 : -1].argmax(-1), output)


@pytest.mark.parametrize(("shows_picture", "ends_as_for_an_image"), [(False, False), (True, False), (True, True)])
def test_text_is_decoded_strictly(shows_picture: bool, ends_as_for_an_image: bool) -> None:
    """As in the model's own text mode, with the features of a picture in the prompt; the mode is not guessed."""
    model = tiny_janus()
    processor = janus_processor()
    picture = Image.effect_noise((16, 16), 64).convert("RGB")
    text = "<s> <image_placeholder> what is this" if shows_picture else "<s> what is this"
    inputs = dict(processor(text=[text], images=picture if shows_picture else None, return_tensors="pt"))
    inputs["input_ids"][:, -1] = BOI if ends_as_for_an_image else inputs["input_ids"][:, -1]
    kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **kwargs)
    attach(model)
    width = inputs["input_ids"].shape[1]
    draft = Oracle(TREES["chain_5"], expected, list(range(40)), 40, 0.2)
    for assistant in (tiny_head(model), draft):
        # A relaxed configuration is for images; text stays strict under it.
        output = model.generate(
            **inputs, **kwargs, assistant=assistant, lantern_config=LanternConfig("chain_5", 5, lam=9.0)
        )
        assert torch.equal(output, expected)
    assert expected.shape[1] > width


def test_the_head_reads_what_the_target_reads() -> None:
    """Embeddings of pictures in a prompt, of words, and of codes, which share no table."""
    model = tiny_janus()
    inputs = dict(
        janus_processor()(
            text=["<s> <image_placeholder> what"], images=Image.new("RGB", (16, 16), "red"), return_tensors="pt"
        )
    )
    adapter = adapter_for(model, inputs["input_ids"])
    seen: dict[str, Any] = {}
    handle = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    ways: list[dict[str, Any]] = [{"pixel_values": inputs["pixel_values"]}]
    with torch.no_grad():
        if "mm_encoder_outputs" in signature(JanusModel.forward).parameters:  # what newer releases make of them
            ways += [{"mm_encoder_outputs": {"image": model.model.get_image_features(**ways[0], return_dict=True)}}]
        for way in ways:
            cache = new_dynamic_cache(model.config.get_text_config())
            prompt = adapter.prefill(inputs["input_ids"], cache, **way)
            assert torch.allclose(prompt.embeds, seen.pop("inputs_embeds"))
    handle.remove()
    assert int((inputs["input_ids"] == IMAGE).sum()) == TOKENS
    words, codes = adapter, adapter_for(model, generation_mode="image")
    ids = torch.tensor([[3, 7]])
    assert not torch.allclose(words.embed(ids, ids), codes.embed(ids, ids))
    assert torch.equal(codes.embed(ids, ids), model.prepare_embeddings_for_image_generation(ids))


def test_structure_and_pixels_of_many_relaxed_images() -> None:
    """200 sampled images: their length and their codes, though code 2 ends a text, and pixels of the right size."""
    model = tiny_janus()
    attach(model, tiny_head(model), LanternConfig("eagle_25", 5, lam=4.0), default_on=True)
    seen: list[Tensor] = []
    for seed in range(4):
        output = model.generate(
            **janus_prompts(10),
            generation_mode="image",
            do_sample=True,
            num_return_sequences=5,
            temperature=2.0,
            generator=torch.Generator().manual_seed(seed),
            return_dict_in_generate=True,
        )
        assert output.stats.tokens_per_pass > 1
        seen.append(output.sequences)
    codes = torch.cat(seen)
    assert codes.shape == (200, TOKENS)
    assert int(codes.min()) >= 0
    assert int(codes.max()) < NUM_CODES
    assert (codes == EOS).any()
    assert len(codes.unique(dim=0)) > 100
    with torch.no_grad():
        pixels = model.decode_image_tokens(codes[:3])
        adapter = adapter_for(model, generation_mode="image")
        grids = adapter.image_codes(codes[:3])
        assert torch.allclose(adapter.pixels(torch.stack([row[0] for row in grids])), pixels.permute(0, 3, 1, 2))
    images = janus_processor().post_process_multimodal_output(pixels.permute(0, 3, 1, 2), generation_mode="image")
    assert [image.size for image in images] == [(16, 16)] * 3
    assert [image.mode for image in images] == ["RGB"] * 3
    assert adapter.image_codes(codes[:2, :-1]) == [[], []]


def test_draws_come_from_the_generator() -> None:
    model = tiny_janus()
    attach(model, tiny_head(model), LanternConfig("chain_5", 5, lam=4.0), default_on=True)
    kwargs = {**janus_prompts(2), "generation_mode": "image", "do_sample": True}
    first, again, other = (
        model.generate(**kwargs, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_prompts_tell_what_they_ask_for() -> None:
    model = tiny_janus()
    ids = torch.tensor([[BOS, 7, BOI], [BOS, 8, BOI]])
    image, text = adapter_for(model, ids), adapter_for(model, ids[:, :2])
    assert (image.makes_image, image.num_codes, image.vocab_size) == (True, NUM_CODES, NUM_CODES)
    assert (text.makes_image, text.num_codes, text.vocab_size) == (False, 0, 40)
    assert not adapter_for(model, ids, generation_mode="text").makes_image
    assert image.unconditional(ids, None)[0].tolist() == [[BOS, PAD, BOI]] * 2
    assert text.unconditional(ids[:, :2], None)[0].tolist() == [[7], [8]]
    with pytest.raises(ValueError, match="1 of 2 prompts end with the begin-image token 3"):
        adapter_for(model, torch.tensor([[BOS, BOI], [BOS, 8]]))


def test_codebook_is_that_of_the_decoder() -> None:
    model = tiny_janus()
    adapter = adapter_for(model)
    looked_up = model.model.vqmodel.quantize.get_codebook_entry(torch.arange(TOKENS)[None])
    raw = adapter.codebook()
    assert torch.equal(raw, model.model.vqmodel.quantize.embedding.weight)
    assert torch.allclose(torch.nn.functional.normalize(raw)[:TOKENS], looked_up.flatten(2)[0].T)
    by_angle = NeighborTable.from_codebook(raw, 5, adapter.codebook_metric)
    assert torch.equal(by_angle.indices, NeighborTable.from_codebook(torch.nn.functional.normalize(raw), 5).indices)
    assert (adapter.codebook_size, adapter.num_codes) == (NUM_CODES, 0)  # text unless told otherwise
    head = tiny_head(model)
    assert head.config.codebook_size == NUM_CODES
    attach(model, head, LanternConfig("chain_5", 5), neighbors=by_angle)
