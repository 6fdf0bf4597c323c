"""From prompts to a head that decodes, by family: in process, and by `lantern-hf distil` and `lantern-hf train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import call, check_refused
from conftest import tiny_head, tiny_llama
from pipelines import tiny_class_pipeline, tiny_pipeline
from tiny_chameleon import tiny_lumina, tiny_tokenizer
from tiny_emu3 import emu3_processor, tiny_emu3
from tiny_families import janus_processor, tiny_janus
from training_families import BY_NAME, Pupil, batch_of

from lantern_hf import TREES, LanternConfig, LanternDraftModel, LanternPipeline, image_prompts, lantern_generate
from lantern_hf.attach import run_generate
from lantern_hf.training import (
    ConditionedSequences,
    DistilConfig,
    PipelineConditioner,
    ProcessorConditioner,
    TrainingConfig,
    evaluate_head,
    forecast_passes,
    read_rows,
    self_distil,
    target_features,
    train_head,
)
from lantern_hf.training.binding import bound_adapter

ROWS = 48


def distilled_head(pupil: Pupil, folder: Path) -> tuple[ProcessorConditioner, LanternDraftModel]:
    """A head trained on what its target drew."""
    conditioner = pupil.conditioner()
    config = DistilConfig(sequences_per_prompt=24, batch_size=48, guidance_scale=1.0)
    self_distil(conditioner, pupil.rows, folder, config)
    data = ConditionedSequences(read_rows(folder), conditioner)
    settings: dict[str, Any] = {"batch_size": 16, "lr": 1e-2, "max_grad_norm": None, "distribution_loss_weight": 1.0}
    settings |= {"feature_noise": 0.0, "guidance_dropout": 0.0, "log_every": 60, "steps": 60}
    return conditioner, train_head(conditioner.target, data, TrainingConfig(**settings))


@pytest.mark.parametrize("name", ["emu3", "janus", "lumina"])
def test_decoding_takes_the_passes_that_training_predicts(name: str, tmp_path: Path) -> None:
    """Row ends and the ends of images included, which cost a node and no rejection."""
    pupil = BY_NAME[name]
    conditioner, head = distilled_head(pupil, tmp_path)
    target = conditioner.target
    prompts = [pupil.prompts[row % 2] for row in range(ROWS)]
    out = run_generate(
        target,
        (),
        image_prompts(target, pupil.processor(), prompts, **pupil.wish)
        | {
            "custom_generate": lantern_generate,
            "assistant": head,
            "lantern_config": LanternConfig.strict("eagle_25"),
            "generator": [torch.Generator().manual_seed(row) for row in range(ROWS)],
            "do_sample": True,
            "top_k": 0,
            "return_dict_in_generate": True,
        },
    )
    rows = [{"prompt": prompt} for prompt in prompts]
    batch, adapter = batch_of(conditioner, rows, out.sequences[:, -pupil.tokens :])
    features = target_features(bound_adapter(target, batch.prompt), batch)
    draws = torch.Generator().manual_seed(1)
    predicted = forecast_passes(head, features, adapter, batch, TREES["eagle_25"], generator=draws)
    measured = torch.tensor(out.stats.row_passes, dtype=torch.float)
    assert predicted["tokens"].tolist() == [pupil.tokens - 1] * ROWS
    gap = measured - predicted["passes"]
    error = gap.std() / ROWS**0.5
    assert abs(gap.mean()) < 3 * error
    assert error < 0.05 * measured.mean()  # what the test can see
    if adapter.structured:  # the last tree reaches past the image, where what must come is counted as accepted
        return
    accepted = torch.tensor(out.stats.accepted_per_depth, dtype=torch.float) / measured.sum()
    forecast = torch.stack([predicted[f"accepted_{d}"].sum() for d in range(1, 6)]) / predicted["passes"].sum()
    assert ((accepted - forecast).abs() < 4 * (accepted * (1 - accepted) / measured.sum()).sqrt() + 0.01).all()


def test_a_trained_head_of_a_structured_family_is_better_than_an_untrained_one(tmp_path: Path) -> None:
    pupil = BY_NAME["emu3"]
    conditioner, head = distilled_head(pupil, tmp_path)
    data = ConditionedSequences(read_rows(tmp_path), conditioner)
    trained, untrained = (
        evaluate_head(conditioner.target, one, data, batch_size=48) for one in (head, tiny_head(conditioner.target))
    )
    assert trained["overlap"] > untrained["overlap"] + 0.05
    assert trained["tokens_per_pass"] > untrained["tokens_per_pass"]


def test_a_head_makes_distillation_faster_and_strict(tmp_path: Path) -> None:
    """With a head of any family the sequences keep their structure; the same seed gives them again."""
    for name in ("emu3", "janus"):
        pupil = BY_NAME[name]
        conditioner = pupil.conditioner()
        config = DistilConfig(guidance_scale=2.0, top_k=12)
        head = tiny_head(conditioner.target)
        runs = [
            read_rows(self_distil(conditioner, pupil.rows, tmp_path / f"{name}{run}", config, assistant=head)[0].parent)
            for run in range(2)
        ]
        assert [row["tokens"].tolist() for row in runs[0]] == [row["tokens"].tolist() for row in runs[1]]
        assert [len(row["tokens"]) for row in runs[0]] == [pupil.tokens] * 2


# ---- the command line


def test_the_commands_on_a_transformers_folder(work: Path) -> None:
    """Emu3: the size is said once, and travels with the sequences."""
    tiny_emu3().save_pretrained("emu3")
    emu3_processor().save_pretrained("emu3")
    (work / "prompts.txt").write_text("a red fox\nhi\n")
    size = ("--height", 24, "--width", 32)
    result = call("distil", "--model", "./emu3", "--prompts", "prompts.txt", "--sequences-per-prompt", 2, *size)
    assert result.exit_code == 0, result.stderr
    rows = read_rows(work / "runs/sequences")
    assert [(row["height"], row["width"], len(row["tokens"])) for row in rows] == [(24, 32, 18)] * 4
    options = ("--steps", 2, "--batch-size", 2, "--eval-sequences", 1, "--guidance-scale", 2)
    result = call("train", "--model", "./emu3", "--data", "runs/sequences", *options)
    assert result.exit_code == 0, result.stderr
    assert "tokens a pass (strict)" in result.stdout
    head = LanternDraftModel.from_pretrained(work / "runs/head")
    pipe = LanternPipeline.from_target(tiny_emu3(), emu3_processor(), head)
    pipe.enable_progress(False)
    assert pipe("hi", height=24, width=32).images[0].size == (32, 24)


def test_the_commands_on_a_checkpoint_of_a_class_that_only_its_publisher_has(work: Path) -> None:
    """Lumina-mGPT, with a tokenizer and no processor."""
    tiny_lumina().save_pretrained("lumina")
    tiny_tokenizer().save_pretrained("lumina")
    config = json.loads((work / "lumina/config.json").read_text())
    config["architectures"] = ["ChameleonXLLMXForConditionalGeneration"]
    (work / "lumina/config.json").write_text(json.dumps(config))
    (work / "prompts.jsonl").write_text('{"prompt": "word1 word2", "height": 8, "width": 12}\n')
    result = call("distil", "--model", "./lumina", "--prompts", "prompts.jsonl")
    assert result.exit_code == 0, result.stderr
    settings = json.loads((work / "runs/sequences/manifest.json").read_text())["settings"]
    assert (settings["guidance_scale"], settings["top_k"]) == (3.0, 2000)  # the family's
    rows = read_rows(work / "runs/sequences")
    conditioner = BY_NAME["lumina"].conditioner()
    batch, adapter = batch_of(conditioner, rows, rows[0]["tokens"][None].long())
    assert [image.shape for image in adapter.image_codes(batch.tokens)[0]] == [(4, 6)]


def test_the_commands_on_a_saved_pipeline(work: Path) -> None:
    """Janus, whose own `generate` takes no decoding loop."""
    LanternPipeline.from_target(tiny_janus(), janus_processor()).save_pretrained("pipe")
    (work / "prompts.txt").write_text("a red fox\na bird\n")
    result = call("distil", "--model", "./pipe", "--prompts", "prompts.txt", "--sequences-per-prompt", 2)
    assert result.exit_code == 0, result.stderr
    rows = read_rows(work / "runs/sequences")
    assert [len(row["tokens"]) for row in rows] == [16] * 4
    settings = json.loads((work / "runs/sequences/manifest.json").read_text())["settings"]
    assert settings["guidance_scale"] == 5.0  # the family's
    options = ("--steps", 2, "--batch-size", 2, "--eval-sequences", 1)
    result = call("train", "--model", "./pipe", "--data", "runs/sequences", *options)
    assert result.exit_code == 0, result.stderr
    head = LanternDraftModel.from_pretrained(work / "runs/head")
    pipe = LanternPipeline.from_pretrained("pipe", draft_head=head)
    pipe.enable_progress(False)
    assert pipe("a red fox").images[0].size == (16, 16)


# ---- errors at the door


@pytest.mark.parametrize(
    ("name", "size", "scale", "message"),
    [
        ("glm_image", {}, 3.0, "decoded without guidance"),
        ("janus", {"height": 32, "width": 32}, 1.0, "images are 16 x 16 pixels, not 32"),
        ("anole", {"height": 9, "width": 9}, 1.0, "`height` must be 8 for this model, got 9"),
        ("lumina", {"height": 9, "width": 8}, 1.0, "`height` must be a multiple of 4 pixels"),
        ("emu3", {"height": 20, "width": 32}, 1.0, "multiples of 8 pixels at the least"),
        ("emu3", {"height": 24}, 1.0, "`height` and `width` go together"),
    ],
)
def test_wishes_that_a_family_cannot_grant_are_refused(
    name: str, size: dict[str, int], scale: float, message: str, tmp_path: Path
) -> None:
    pupil = BY_NAME[name]
    conditioner = pupil.conditioner(**size)
    with pytest.raises(ValueError, match=message):
        self_distil(conditioner, pupil.rows, tmp_path / "out", DistilConfig(guidance_scale=scale))
    assert not (tmp_path / "out").exists()


def test_conditioners_that_cannot_speak_are_refused() -> None:
    emu3 = tiny_emu3()
    with pytest.raises(ValueError, match="by its processor, not by a tokenizer alone"):
        ProcessorConditioner(emu3, emu3_processor().tokenizer)
    with pytest.raises(ValueError, match="need its processor. Pass one"):
        ProcessorConditioner(emu3, None).encode_prompts([{"prompt": "a red fox"}])
    with pytest.raises(ValueError, match="' ' is empty: it has 0 tokens"):
        BY_NAME["anole"].conditioner().encode_prompts([{"prompt": " "}])
    with pytest.raises(ValueError, match="asked by `prompt`, which a row lacks; it has \\['class_label'\\]"):
        BY_NAME["janus"].conditioner().encode_prompts([{"class_label": 1}])
    with pytest.raises(ValueError, match="draws classes in one size"):
        PipelineConditioner(tiny_class_pipeline(), height=16, width=16).check()
    with pytest.raises(ValueError, match="LlamaGen takes no `height`"):
        PipelineConditioner(tiny_pipeline(head=False), height=16).check()
    with pytest.raises(ValueError, match="draws no images, so it takes no `height`"):
        ProcessorConditioner(tiny_llama(), tiny_tokenizer(), height=16)
    with pytest.raises(ValueError, match="`width` must be a whole number of pixels, at least 1, got '32'"):
        BY_NAME["emu3"].conditioner().encode_prompts([{"prompt": "hi", "height": 24, "width": "32"}])


def test_the_commands_refuse_what_the_family_does_not_have(work: Path) -> None:
    LanternPipeline.from_target(tiny_janus(), janus_processor()).save_pretrained("pipe")
    (work / "prompts.txt").write_text("a red fox\n")
    result = call("distil", "--model", "./pipe", "--prompts", "prompts.txt", "--height", 32, "--width", 32)
    check_refused(result, "images are 16 x 16 pixels, not 32")
    (work / "data.jsonl").write_text('{"prompt": "a red fox", "tokens": [1, 2, 3]}\n' * 2)
    result = call("train", "--model", "./pipe", "--data", "data.jsonl", "--height", 32)
    check_refused(result, "images are 16 x 16 pixels, not 32")
    tiny_emu3().save_pretrained("bare")
    result = call("distil", "--model", "./bare", "--prompts", "prompts.txt")
    check_refused(result, "has no processor or tokenizer")
    tiny_tokenizer().save_pretrained("bare")
    result = call("distil", "--model", "./bare", "--prompts", "prompts.txt")
    check_refused(result, "by its processor, not by a tokenizer alone")
    assert sorted(path.name for path in work.iterdir()) == ["bare", "data.jsonl", "pipe", "prompts.txt"]
