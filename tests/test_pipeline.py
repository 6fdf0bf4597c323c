"""`LanternPipeline`: images, reproducibility, saving and the Hub, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pipelines import PREFIX, seed, tiny_class_pipeline, tiny_pipeline, tiny_tokenizer

import lantern_hf
from lantern_hf import LanternConfig, LanternPipeline, NeighborTable, embedded_pipeline
from lantern_hf._pipeline_prompts import encode_prompts

TOKENS = 64
STRICT = LanternConfig.strict("narrow_8")


def pixels(output) -> np.ndarray:
    return np.stack([np.asarray(image) for image in output.images])


def test_gives_images_with_fewer_passes_than_tokens() -> None:
    pipe = tiny_pipeline()
    output = pipe(["red fox", "a blue bird"], num_images_per_prompt=2, generator=seed())
    assert [image.size for image in output.images] == [(16, 16)] * 4
    assert output.codes.shape == (4, 8, 8)
    assert output.stats.new_tokens == [TOKENS] * 4
    assert output.stats.passes < TOKENS - 1


def test_same_seed_same_image_and_rows_do_not_mix() -> None:
    pipe = tiny_pipeline()
    one = pipe("red fox", generator=[seed(0)], lantern_config=STRICT, output_type="latent")
    batch = pipe(["a blue bird", "red fox"], generator=[seed(7), seed(0)], lantern_config=STRICT, output_type="latent")
    assert torch.equal(one.codes[0], batch.codes[1])
    assert torch.equal(one.images, one.codes)


def test_strict_greedy_equals_plain_greedy() -> None:
    pipe = tiny_pipeline()
    lantern = pipe("red fox", do_sample=False, lantern_config=STRICT, output_type="latent")
    plain = pipe("red fox", do_sample=False, lantern_config=None, output_type="latent")
    assert torch.equal(lantern.codes, plain.codes)
    assert plain.stats.passes == TOKENS - 1
    assert lantern.stats.passes <= plain.stats.passes


def test_guidance_and_sampling_arguments_reach_the_decoding() -> None:
    pipe = tiny_pipeline()
    base = {"prompt": "red fox", "lantern_config": None, "output_type": "latent"}
    greedy = pipe(**base, do_sample=False).codes
    assert torch.equal(pipe(**base, top_k=1, generator=seed()).codes, greedy)
    assert torch.equal(pipe(**base, top_p=1e-6, generator=seed()).codes, greedy)
    assert torch.equal(pipe(**base, temperature=1e-4, generator=seed()).codes, greedy)
    assert not torch.equal(pipe(**base, do_sample=False, guidance_scale=1.0).codes, greedy)


@pytest.mark.parametrize("output_type", ["np", "pt"])
def test_output_types(output_type: str) -> None:
    images = tiny_pipeline()("red fox", generator=seed(), output_type=output_type).images
    shape = (1, 16, 16, 3) if output_type == "np" else (1, 3, 16, 16)
    assert tuple(images.shape) == shape
    assert 0 <= images.min() <= images.max() <= 1


def test_tuple_without_return_dict() -> None:
    images, stats, codes = tiny_pipeline()("red fox", generator=seed(), return_dict=False)
    assert (len(images), stats.new_tokens, tuple(codes.shape)) == (1, [TOKENS], (1, 8, 8))


def test_without_head_it_decodes_plainly() -> None:
    pipe = tiny_pipeline(head=False)
    assert pipe("red fox", generator=seed()).stats.passes == TOKENS - 1
    with pytest.raises(ValueError, match="no draft head"):
        pipe("red fox", lantern_config=LanternConfig())


def test_defaults_come_from_the_head() -> None:
    pipe = tiny_pipeline()
    pipe.draft_head.config.lantern_config = STRICT.to_dict()
    assert pipe._resolve_config("default") == STRICT
    assert pipe("red fox", generator=seed()).stats.relaxed_tv == [0.0]
    assert pipe.draft_head.neighbors is None  # strict decoding needs no table


def test_an_attached_transformer_serves_as_well() -> None:
    pipe = tiny_pipeline()
    expected = pipe("red fox", generator=seed()).codes
    lantern_hf.attach(pipe.transformer, pipe.draft_head, default_on=True)
    assert torch.equal(pipe("red fox", generator=seed()).codes, expected)


def test_classes() -> None:
    pipe = tiny_class_pipeline()
    output = pipe(class_labels=[1, 4], num_images_per_prompt=2, generator=seed())
    assert (len(output.images), output.codes.shape) == (4, (4, 4, 4))
    assert len(pipe(class_labels=3, guidance_scale=1.0, generator=seed()).images) == 1
    with pytest.raises(ValueError, match=r"whole numbers in \[0, 5\), got 5"):
        pipe(class_labels=5)
    with pytest.raises(ValueError, match="draws from `class_labels`"):
        pipe("red fox")


def test_right_padded_features_are_rolled_to_the_end() -> None:
    pipe, device = tiny_pipeline(), torch.device("cpu")
    prompts = ["red fox", "a blue bird"]
    left = encode_prompts(tiny_tokenizer("left"), pipe.text_encoder, prompts, PREFIX, device)
    right = encode_prompts(tiny_tokenizer("right"), pipe.text_encoder, prompts, PREFIX, device)
    assert right[1].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert torch.equal(left[1], right[1])
    torch.testing.assert_close(left[0], right[0])  # T5 knows relative positions only


def test_callback_and_bar_follow_the_tokens() -> None:
    pipe, calls = tiny_pipeline(), []
    output = pipe(
        "red fox",
        num_images_per_prompt=2,
        generator=seed(),
        callback_on_step_end=lambda *arguments: calls.append(arguments),
        callback_on_step_end_tensor_inputs=["image_tokens", "image"],
    )
    assert [call[1] for call in calls] == list(range(output.stats.passes))
    counts = [call[2] for call in calls]
    assert counts == sorted(counts)
    assert counts[-1] == 2 * TOKENS
    first, last = calls[0][3], calls[-1][3]
    assert int((first["image_tokens"] >= 0).sum()) == counts[0]
    assert first["image"].shape == (2, 3, 16, 16)
    assert torch.equal(last["image_tokens"].view(2, 8, 8), output.codes)


def test_model_offload() -> None:
    pipe = tiny_pipeline()
    expected = pipe("red fox", generator=seed()).codes
    pipe.enable_model_cpu_offload(device="cpu")
    assert torch.equal(pipe("red fox", generator=seed()).codes, expected)
    with pytest.raises(ValueError, match="under model offload"):
        pipe("red fox", callback_on_step_end=print, callback_on_step_end_tensor_inputs=["image"])


def test_the_table_is_made_once_and_grown_on_demand() -> None:
    pipe = tiny_pipeline()
    pipe("red fox", generator=seed(), lantern_config=LanternConfig("narrow_8", 4))
    table = pipe.draft_head.neighbors
    pipe("red fox", generator=seed(), lantern_config=LanternConfig("narrow_8", 2))
    assert pipe.draft_head.neighbors is table
    assert table.k == 4
    pipe("red fox", generator=seed(), lantern_config=LanternConfig("narrow_8", 9))
    assert pipe.draft_head.neighbors.k == 9
    pipe.draft_head.neighbors = NeighborTable.from_codebook(torch.randn(24, 4), 10)
    with pytest.raises(ValueError, match="another codebook"):
        pipe("red fox")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "has 0 tokens"),
        ({"prompt": ["red fox", " , "]}, "has 0 tokens"),
        ({"prompt": []}, "empty list"),
        ({"prompt": "a red fox a blue bird a"}, "has 7 tokens, this model reads at most 6. Shorten it by 1"),
        ({"prompt": None}, "draws from `prompt`"),
        ({"class_labels": 1}, "draws from `prompt`"),
        ({"guidance_scale": 0.5}, "`guidance_scale` must be at least 1"),
        ({"guidance_scale": float("nan")}, "`guidance_scale` must be at least 1"),
        ({"top_k": -1}, "`top_k` must be"),
        ({"top_p": 0}, "`top_p` must be"),
        ({"temperature": 0}, "`temperature` must be"),
        ({"num_images_per_prompt": 0}, "`num_images_per_prompt` must be"),
        ({"output_type": "jpg"}, "`output_type` must be"),
        ({"generator": [seed(), seed()]}, "2 generators for 1 images"),
        ({"lantern_config": "fast"}, "got 'fast'"),
        ({"lantern_config": {"lam": 2.0, "delta": 0.1}}, "two rules"),
        ({"lantern_config": {"neighborhood_size": 24}}, "`neighborhood_size` must be below 24"),
        ({"callback_on_step_end": 3}, "must be callable"),
        ({"callback_on_step_end": print, "callback_on_step_end_tensor_inputs": ["latents"]}, "must be among"),
    ],
)
def test_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_pipeline()(**({"prompt": "red fox"} if "class_labels" not in arguments else {}) | arguments)


def test_refuses_other_types() -> None:
    with pytest.raises(TypeError, match="`prompt` must be a string"):
        tiny_pipeline()([1])
    with pytest.raises(TypeError, match=r"must be a torch\.Generator"):
        tiny_pipeline()("red fox", generator=3)


def test_parts_must_fit() -> None:
    pipe = tiny_pipeline()
    pipe.vq_model.register_to_config(num_vq_embeddings=32)
    with pytest.raises(ValueError, match="`vq_model` has 32 codes"):
        LanternPipeline(pipe.transformer, pipe.vq_model)
    other = tiny_class_pipeline()
    with pytest.raises(ValueError, match="does not fit"):
        LanternPipeline(other.transformer, other.vq_model, draft_head=pipe.draft_head)


@pytest.mark.parametrize("head", [True, False])
def test_save_and_load(tmp_path: Path, head: bool) -> None:
    pipe = tiny_pipeline(head)
    expected = pixels(pipe("red fox", generator=seed()))
    pipe.save_pretrained(tmp_path)
    loaded = LanternPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert loaded.config.guidance_scale == 2.0
    assert (loaded.draft_head is None) is not head
    if head:
        assert torch.equal(loaded.draft_head.neighbors.indices, pipe.draft_head.neighbors.indices)
    assert np.array_equal(pixels(loaded("red fox", generator=seed())), expected)
    half = LanternPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    half.set_progress_bar_config(disable=True)
    assert half.transformer.dtype == torch.bfloat16
    assert len(half("red fox", generator=seed()).images) == 1


def test_embedded_pipeline_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern_hf.assets.__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="Reinstall lantern_hf"):
        embedded_pipeline()
