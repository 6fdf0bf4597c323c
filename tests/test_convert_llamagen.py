"""LlamaGen targets: every published layout and size converts, equals the recorded model, and generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published import class_conditional, folder, foundation, golden, golden_config, training_file

from lantern_hf import LanternConfig, LanternDraftModel, LlamaGenForConditionalGeneration, lantern_generate
from lantern_hf.convert import ConversionReport, convert
from lantern_hf.convert.checkpoint import Checkpoint, Entry
from lantern_hf.convert.llamagen import plan_llamagen
from lantern_hf.convert.plan import Options

TINY = {"grid": 4, "num_attention_heads": 4}
FORMS = ("safetensors", "bin", "sharded safetensors", "sharded bin")


def load(out: Path) -> LlamaGenForConditionalGeneration:
    model = LlamaGenForConditionalGeneration.from_pretrained(out).eval()
    assert not any(bool(value.isnan().any()) for value in model.state_dict().values())
    return model


def check_recorded(model: LlamaGenForConditionalGeneration) -> None:
    io = golden("llamagen_target_io")
    ids = torch.cat([model.caption_ids(2), io["input_ids"].long()], dim=1)
    with torch.no_grad():
        output = model(ids, attention_mask=io["attention_mask"], caption_embeds=io["cond_idx"])
    kept = io["attention_mask"].bool()
    assert (output.logits[..., :128] - io["logits"])[kept].abs().max() < 1e-4


def check_generates(model: LlamaGenForConditionalGeneration, head: Path, tmp_path: Path) -> None:
    """Drafts with a converted head, strictly: the same greedy codes as without it."""
    convert(head, tmp_path / "head", target=tmp_path / "out")
    drafter = LanternDraftModel.from_pretrained(tmp_path / "head")
    if model.config.conditioning == "class":
        inputs = {"input_ids": torch.tensor([[128 + 3]])}
    else:
        features = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(4))
        inputs = {"input_ids": model.caption_ids(1), "caption_embeds": features}
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    drafted = model.generate(
        **inputs,
        custom_generate=lantern_generate,
        assistant=drafter,
        lantern_config=LanternConfig.strict("narrow_8"),
        do_sample=False,
        max_new_tokens=16,
    )
    assert torch.equal(drafted, plain)
    assert int(plain[:, -16:].max()) < 128


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A drafter in published layout whose config does not name a stage."""
    config = {key: value for key, value in golden_config("llamagen_drafter").items() if key != "input_type"}
    return folder(tmp_path / "drafter", golden("llamagen_drafter"), config, "bin")


@pytest.mark.parametrize("form", FORMS)
def test_hub_style(form: str, head: Path, tmp_path: Path) -> None:
    weights = golden("llamagen_target")
    source = folder(tmp_path / "in", weights, golden_config("llamagen_target"), form)
    report = convert(source, tmp_path / "out", verify=True)
    model = load(tmp_path / "out")
    check_recorded(model)
    assert model.config.grid_size == [4, 4]
    assert report.facts["grid"] == "4x4 (config.json)"
    assert report.facts["conditioning"] == "text, 6 positions of width 24 (120 rows are there)"
    assert report.max_error is not None
    assert report.max_error < 1e-4
    assert report.tensors == len(model.state_dict())
    if form == "bin":
        check_generates(model, head, tmp_path)


@pytest.mark.parametrize("wrapper", ["model", "module", "state_dict", None])
def test_foundation_vision_text(wrapper: str | None, head: Path, tmp_path: Path) -> None:
    weights = foundation(golden("llamagen_target"))
    assert "layers.2.attention.wqkv.weight" in weights
    source = training_file(tmp_path / "t2i.pt", weights, wrapper)
    report = convert(source, tmp_path / "out", verify=True, prefix_length=6, **TINY)
    assert report.max_error is not None
    assert report.max_error < 1e-4
    assert report.leftovers == ([] if wrapper is None else ["optimizer", "steps", "args"])
    model = load(tmp_path / "out")
    check_recorded(model)
    if wrapper == "model":
        check_generates(model, head, tmp_path)


@pytest.mark.parametrize("layout", ["hub", "foundation"])
def test_class_conditional(layout: str, head: Path, tmp_path: Path) -> None:
    weights = class_conditional(golden("llamagen_target"))
    if layout == "hub":
        config = golden_config("llamagen_target") | {"input_type": "c2i", "cls_token_num": 1}
        source = folder(tmp_path / "in", weights, config, "safetensors")
        report = convert(source, tmp_path / "out", verify=True)
    else:
        wrapped = {f"module._orig_mod.{key}": value for key, value in foundation(weights).items()}
        source = training_file(tmp_path / "c2i.pt", wrapped)
        report = convert(source, tmp_path / "out", verify=True, **TINY)
    assert report.facts["conditioning"] == "5 classes and none"
    assert report.max_error is not None
    assert report.max_error < 1e-4
    model = load(tmp_path / "out")
    assert model.config.vocab_size == 128 + 6
    assert torch.equal(model.model.prefix.class_embedding.weight, weights["model.cls_embedding.embedding_table.weight"])
    check_generates(model, head, tmp_path)


def test_both_layouts_give_the_same_bits(tmp_path: Path) -> None:
    weights = golden("llamagen_target")
    convert(folder(tmp_path / "in", weights, golden_config("llamagen_target"), "bin"), tmp_path / "hub")
    source = training_file(tmp_path / "t2i.pt", foundation(weights))
    convert(source, tmp_path / "out", prefix_length=6, max_shard_size="100KB", **TINY)
    first, second = load(tmp_path / "hub").state_dict(), load(tmp_path / "out").state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert first.keys() == second.keys()
    shards = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert shards[0].startswith("model-00001-of-")
    assert len(shards) > 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    source = folder(tmp_path / "in", golden("llamagen_target"), golden_config("llamagen_target"), "safetensors")
    report = convert(source, tmp_path / "out", dtype=dtype, verify=True)
    model = load(tmp_path / "out")
    assert model.dtype == dtype
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert report.max_error is not None
    assert report.max_error < 1e-4  # against the rule with weights rounded alike
    expected = golden("llamagen_target")["lm_head.weight"].to(dtype)
    assert torch.equal(model.lm_head.weight, expected)


class Shapes(Checkpoint):
    """A checkpoint of which only names and shapes are known."""

    def __init__(self, tensors: dict[str, Entry], label: str):
        self.tensors, self.label, self.config, self.path = tensors, label, {}, Path(label)


def published_shapes(layers: int, width: int, inner: int, classes: bool) -> dict[str, Entry]:
    """FoundationVision's names and shapes of a size."""
    shapes = {"tok_embeddings.weight": (16384, width), "norm.weight": (width,), "output.weight": (16384, width)}
    for index in range(layers):
        shapes |= {
            f"layers.{index}.attention.wqkv.weight": (3 * width, width),
            f"layers.{index}.attention.wo.weight": (width, width),
            f"layers.{index}.feed_forward.w1.weight": (inner, width),
            f"layers.{index}.feed_forward.w3.weight": (inner, width),
            f"layers.{index}.feed_forward.w2.weight": (width, inner),
            f"layers.{index}.attention_norm.weight": (width,),
            f"layers.{index}.ffn_norm.weight": (width,),
        }
    if classes:
        shapes["cls_embedding.embedding_table.weight"] = (1001, width)
    else:
        shapes["cls_embedding.cap_proj.fc1.weight"] = (width, 2048)
        shapes["cls_embedding.cap_proj.fc2.weight"] = (width, width)
        shapes["cls_embedding.uncond_embedding"] = (120, 2048)
    return {key: Entry(shape, torch.float32) for key, shape in shapes.items()}


@pytest.mark.parametrize(
    ("name", "layers", "width", "inner", "heads", "size", "grid"),
    [
        ("c2i_B_256.pt", 12, 768, 2048, 12, "B", 16),
        ("c2i_L_384.pt", 24, 1024, 2816, 16, "L", 24),
        ("c2i_XL_384.pt", 36, 1280, 3584, 20, "XL", 24),
        ("c2i_XXL_384.pt", 48, 1536, 4096, 24, "XXL", 24),
        ("c2i_3B_384.pt", 24, 3200, 8704, 32, "3B", 24),
        ("t2i_XL_stage1_256.pt", 36, 1280, 3584, 20, "XL", 16),
        ("t2i_XL_stage2_512.pt", 36, 1280, 3584, 20, "XL", 32),
    ],
)
def test_every_published_size(name: str, layers: int, width: int, inner: int, heads: int, size: str, grid: int) -> None:
    classes = name.startswith("c2i")
    plan = plan_llamagen(Shapes(published_shapes(layers, width, inner, classes), name), Options())
    assert plan.facts["size"].startswith(f"{size}: {layers} layers, width {width}, {heads} heads")
    assert plan.facts["grid"] == f"{grid}x{grid} (from the name '{name}')"
    expected = "1000 classes and none" if classes else "text, 120 positions of width 2048"
    assert plan.facts["conditioning"] == expected
    rotated = {output.head_dim for output in plan.outputs if output.head_dim}
    assert rotated == {width // heads}


@pytest.mark.parametrize(
    ("label", "side"),
    [
        ("jadohu/LlamaGen-T2I", 16),
        ("jadohu/LlamaGen-T2I-2", 32),
        ("x/t2i_XL_stage2_512/w.pt", 32),
        ("a/c2i_384.pt", 24),
    ],
)
def test_the_grid_from_a_name(label: str, side: int) -> None:
    plan = plan_llamagen(Shapes(published_shapes(12, 768, 2048, False), label), Options())
    assert plan.facts["grid"].startswith(f"{side}x{side} ")


def test_the_report_says_what_was_used_and_ignored(tmp_path: Path) -> None:
    weights = golden("llamagen_target") | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    source = folder(tmp_path / "in", weights, golden_config("llamagen_target"), "bin")
    report = convert(source, tmp_path / "out", verify=True)
    assert isinstance(report, ConversionReport)
    assert report.ignored == {"model.layers.0.self_attn.rotary_emb.inv_freq": "rotary table, computed"}
    text = "\n".join(report.lines())
    assert "LlamaGen target" in text
    assert "inv_freq (rotary table, computed)" in text
    assert "verified: largest error" in text
    assert not list(tmp_path.glob(".*"))
