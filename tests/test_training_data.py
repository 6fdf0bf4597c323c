"""Training data as people have it: JSON lines, images, processors, `datasets`; and what the target makes itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import NUM_CODES, prompt, tiny_chameleon, tiny_llama, tiny_llamagen
from pipelines import tiny_class_pipeline, tiny_pipeline, tiny_tokenizer
from tiny import STEPS
from transformers import ChameleonImageProcessorPil, ChameleonProcessor, PreTrainedTokenizerFast

import lantern_hf
from lantern_hf import LanternPipeline, image_prompts
from lantern_hf.models.vq import encode_pixels
from lantern_hf.targets import adapter_for
from lantern_hf.training import (
    ConditionedSequences,
    DistilConfig,
    PipelineConditioner,
    ProcessorConditioner,
    TrainingConfig,
    collate,
    load_dataset_rows,
    read_prompts,
    read_rows,
    self_distil,
    train_head,
)
from lantern_hf.training.conditioning import fit_image
from lantern_hf.training.runtime import seed_of

PROMPTS = [{"prompt": "red fox"}, {"prompt": "a blue bird"}, {"prompt": "fox"}]


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chameleon_processor() -> ChameleonProcessor:
    """A processor of the tiny Chameleon: one word tokenizer, its own image processor at 16 pixels."""
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "sep_token": "<sep>"})
    tokenizer.image_token, tokenizer.boi_token, tokenizer.eoi_token = "<image>", "<racm3:break>", "<eoss>"
    size = {"height": 16, "width": 16}
    images = ChameleonImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    return ChameleonProcessor(images, tokenizer, image_seq_length=64)


def test_prompts_of_a_pipeline_are_those_it_decodes() -> None:
    pipe = tiny_pipeline(padding_side="right")
    rows = [row | {"tokens": [1, 2, 3]} for row in PROMPTS]
    batch = collate(ConditionedSequences(rows, PipelineConditioner(pipe)).__getitems__([1, 0]))
    expected = image_prompts(pipe.transformer, pipe._parts.reader, ["a blue bird", "red fox"])
    assert expected.pop("max_new_tokens") == tiny_llamagen().config.num_image_tokens
    assert batch.prompt.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(batch.prompt[name], value)
    assert batch.tokens.tolist() == [[1, 2, 3]] * 2
    long = PipelineConditioner(pipe).encode_prompts([{"prompt": "a red fox a blue bird a red fox"}])
    assert long[0]["attention_mask"].tolist() == [1] * 6  # cut, as published LlamaGen cuts
    with pytest.raises(ValueError, match="',' is empty: it has 0 tokens"):
        PipelineConditioner(pipe).encode_prompts([{"prompt": ","}])
    with pytest.raises(ValueError, match="asked by `prompt`, which a row lacks; it has \\['class_label'\\]"):
        PipelineConditioner(pipe).encode_prompts([{"class_label": 1}])


def test_classes_of_a_pipeline() -> None:
    conditioner = PipelineConditioner(tiny_class_pipeline())
    assert conditioner.asks == "class_label"
    items = conditioner.encode_prompts([{"class_label": 3}, {"class_label": 0}])
    assert [item["input_ids"].tolist() for item in items] == [[NUM_CODES + 3], [NUM_CODES]]
    with pytest.raises(ValueError, match="whole numbers in \\[0, 5\\), got 5"):
        conditioner.encode_prompts([{"class_label": 5}])


def test_images_become_the_codes_of_the_pipelines_vq_model(tmp_path: Path) -> None:
    pipe = tiny_pipeline()
    rng = np.random.default_rng(0)
    pictures = [PIL.Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(3)]
    for index, picture in enumerate(pictures):
        picture.save(tmp_path / f"{index}.png")
    texts = ("red fox", "blue bird", "fox")
    write_lines(tmp_path / "metadata.jsonl", [{"file_name": f"{i}.png", "text": text} for i, text in enumerate(texts)])
    data = ConditionedSequences(read_rows(tmp_path), PipelineConditioner(pipe))
    pixels = torch.stack([torch.from_numpy(np.array(picture)) for picture in pictures]).permute(0, 3, 1, 2)
    codes = encode_pixels(pipe.vq_model, pixels / 127.5 - 1).flatten(1)
    assert torch.equal(collate(data.__getitems__([0, 1, 2])).tokens, codes)
    encode, calls = pipe.vq_model.encode, []
    pipe.vq_model.encode = lambda *args, **kwargs: calls.append(1) or encode(*args, **kwargs)
    assert torch.equal(data[1]["tokens"], codes[1])
    assert not calls  # kept
    head = train_head(pipe.transformer, data, TrainingConfig(steps=1, **STEPS))
    assert head.target is pipe.transformer


def test_images_are_scaled_cut_and_laid_on_white() -> None:
    clear = PIL.Image.new("RGBA", (40, 20), (0, 0, 0, 0))
    clear.paste((255, 0, 0, 255), (10, 0, 30, 20))
    fitted = fit_image(clear, 8, 8)
    assert (fitted.mode, fitted.size, fitted.getpixel((4, 4))) == ("RGB", (8, 8), (255, 0, 0))
    assert fit_image(PIL.Image.new("LA", (8, 8), (0, 0)), 8, 8).getpixel((0, 0)) == (255, 255, 255)


def test_a_processors_prompts_and_images() -> None:
    target, processor = tiny_chameleon(), chameleon_processor()
    conditioner = ProcessorConditioner(target, processor)
    ids = conditioner.encode_prompts([{"prompt": "red fox"}])[0]["input_ids"].tolist()
    words = processor.tokenizer.convert_tokens_to_ids(["red", "fox", "<sep>"])
    assert ids == [0, *words, 3]  # the begin-image token asks for an image
    assert ids == image_prompts(target, processor, "red fox")["input_ids"][0].tolist()
    assert conditioner.num_tokens == 64
    picture = PIL.Image.fromarray(np.random.default_rng(1).integers(0, 255, (20, 30, 3), dtype=np.uint8))
    tokens = conditioner.encode_images([picture, picture])
    assert tokens.shape == (2, 64)
    adapter = adapter_for(target, torch.tensor([ids]))
    assert bool((adapter.columns_of(tokens) >= 0).all())
    pixels = processor.image_processor([picture], return_tensors="pt").pixel_values
    codes = target.model.vqmodel.encode(pixels).image_tokens.flatten()
    assert adapter.columns_of(tokens[0]).tolist() == codes.tolist()


def test_a_text_model_and_its_tokenizer() -> None:
    conditioner = ProcessorConditioner(tiny_llama(), tiny_tokenizer())
    assert conditioner.encode_prompts([{"prompt": "red fox"}])[0]["input_ids"].tolist() == [3, 5]
    assert conditioner.num_tokens is None
    with pytest.raises(ValueError, match="cannot turn images into tokens"):
        conditioner.encode_images([PIL.Image.new("RGB", (8, 8))])


def test_rows_of_ids_need_no_conditioner(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7][:n], "tokens": [1, 2, 3]} for n in (2, 3)]
    data = ConditionedSequences(read_rows(write_lines(tmp_path / "a.jsonl", rows)))
    batch = collate(data.__getitems__([0, 1]))
    assert batch.prompt["input_ids"].tolist() == [[0, 5, 6], [5, 6, 7]]
    assert batch.prompt["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    other = [{"input_ids": torch.tensor([5]), "tokens": torch.tensor([1])}]
    assert data.fingerprint != ConditionedSequences(other).fingerprint
    train_head(tiny_llama(), data, TrainingConfig(steps=1, **STEPS))
    with pytest.raises(ValueError, match="need a conditioner"):
        ConditionedSequences([{"prompt": "fox", "tokens": [1]}])[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ('\n{"tokens": [1]}', "line 2: a row needs one of prompt, class_label, input_ids, got \\['tokens'\\]"),
        ("[1]", "line 1: a row needs one of .* got list"),
        ('{"prompt": "fox"}', "line 1: a row needs `tokens`"),
        ('{"prompt": "fox", "tokens": [0.5]}', "line 1: `tokens` and `input_ids` must be lists of token ids"),
        ('{"prompt": "fox", "tokens": []}', "line 1: `tokens` and `input_ids` must be lists of token ids"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / "a.jsonl")


def test_missing_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl does not exist"):
        read_rows(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="neither `metadata.jsonl` beside images nor shards"):
        read_rows(tmp_path)
    write_lines(tmp_path / "metadata.jsonl", [{"file_name": "gone.png", "text": "fox"}])
    with pytest.raises(FileNotFoundError, match="names 'gone.png', which is not in"):
        read_rows(tmp_path)
    write_lines(tmp_path / "metadata.jsonl", [{"file_name": "gone.png"}])
    with pytest.raises(ValueError, match="needs one of prompt, text, caption"):
        read_rows(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'lantern_hf\[datasets\]'"):
        load_dataset_rows("someone/pictures")


def test_prompts_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("red fox\n\n blue bird \n")
    assert read_prompts(tmp_path / "a.txt") == [{"prompt": "red fox"}, {"prompt": "blue bird"}]
    write_lines(tmp_path / "a.jsonl", [{"prompt": "fox", "more": 1}])
    assert read_prompts(tmp_path / "a.jsonl") == [{"prompt": "fox"}]
    (tmp_path / "b.txt").write_text("3\nfox\n")
    with pytest.raises(ValueError, match="b.txt, line 2: this target is asked by `class_label`"):
        read_prompts(tmp_path / "b.txt", "class_label")
    (tmp_path / "c.txt").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(tmp_path / "c.txt")
    with pytest.raises(FileNotFoundError, match=r"d.txt do not exist"):
        read_prompts(tmp_path / "d.txt")


def distil(pipe: LanternPipeline, folder: Path, head: bool = False, **settings) -> list[Path]:
    """Nine sequences of 10 tokens in shards of 3."""
    settings = {"sequences_per_prompt": 3, "guidance_scale": 2.0, "max_new_tokens": 10, "shard_size": 3} | settings
    assistant = pipe.draft_head if head else None
    return self_distil(PipelineConditioner(pipe), PROMPTS, folder, DistilConfig(**settings), assistant=assistant)


def test_self_distillation_is_generation_and_does_not_depend_on_batches(tmp_path: Path) -> None:
    pipe = tiny_pipeline()
    shards = distil(pipe, tmp_path / "one", batch_size=3)
    assert [shard.name for shard in shards] == [f"shard-{index:05d}.jsonl" for index in range(3)]
    rows = read_rows(tmp_path / "one")
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in PROMPTS for _ in range(3)]
    other = read_rows(distil(pipe, tmp_path / "other", batch_size=1)[0].parent)
    assert [row["tokens"].tolist() for row in rows] == [row["tokens"].tolist() for row in other]
    manifest = json.loads((tmp_path / "one/manifest.json").read_text())
    assert manifest["settings"]["guidance_scale"] == 2.0
    assert {"target", "prompts", "sequences", "version"} <= manifest.keys()
    inputs = prompt(pipe.transformer)  # that the tokens are what generate draws from the row's own seed
    items = PipelineConditioner(pipe).encode_prompts([PROMPTS[1]])[0]
    assert items.keys() == inputs.keys()
    out = pipe.transformer.generate(
        **{name: value[None] for name, value in items.items()},
        custom_generate=lantern_hf.lantern_generate,
        generator=torch.Generator().manual_seed(seed_of(0, 4, "sequence")),
        do_sample=True,
        guidance_scale=2.0,
        max_new_tokens=10,
    )
    assert out[0, -10:].tolist() == rows[4]["tokens"].tolist()


def test_self_distillation_goes_on_and_redoes_only_what_is_damaged(tmp_path: Path) -> None:
    pipe = tiny_pipeline()
    shards = distil(pipe, tmp_path, head=True)
    contents = [shard.read_bytes() for shard in shards]
    shards[1].write_bytes(contents[1][:-9])
    with pytest.raises(ValueError, match="damaged shards, whose checksums differ: shard-00001.jsonl"):
        read_rows(tmp_path)
    times = [shard.stat().st_mtime_ns for shard in shards]
    assert distil(pipe, tmp_path, head=True) == shards
    assert [shard.read_bytes() for shard in shards] == contents
    assert [shard.stat().st_mtime_ns == time for shard, time in zip(shards, times, strict=True)] == [True, False, True]
    assert distil(pipe, tmp_path, head=True, batch_size=2) == shards
    with pytest.raises(ValueError, match="sequences of other settings: `settings`"):
        distil(pipe, tmp_path, head=True, seed=1)
    with pytest.raises(ValueError, match="Set `max_new_tokens`"):
        self_distil(ProcessorConditioner(tiny_llama(), tiny_tokenizer()), PROMPTS, tmp_path / "x", DistilConfig())


def test_distilled_sequences_are_drawn_from_the_target(tmp_path: Path) -> None:
    """With a head the sequences are others, but their first tokens have the target's distribution."""
    pipe = tiny_pipeline()
    settings = {"sequences_per_prompt": 100, "guidance_scale": 1.0, "max_new_tokens": 3, "shard_size": 300}
    drawn = read_rows(distil(pipe, tmp_path, head=True, batch_size=100, **settings)[0].parent)
    target = pipe.transformer
    seconds = torch.tensor([row["tokens"][:2].tolist() for row in drawn[:100]])
    items = PipelineConditioner(pipe).encode_prompts([PROMPTS[0]])[0]
    rows = {name: value[None].expand(100, *value.shape) for name, value in items.items()}
    rows["input_ids"] = torch.cat([rows["input_ids"], seconds[:, :1]], 1)
    rows["attention_mask"] = torch.cat([rows["attention_mask"], torch.ones(100, 1, dtype=torch.long)], 1)
    with torch.no_grad():
        probs = target(**rows).logits[:, -1, :NUM_CODES].softmax(-1)
    likelihood = probs.gather(1, seconds[:, 1:]).log().mean()
    entropy = (probs * probs.log()).sum(-1).mean()
    spread = ((probs * probs.log() ** 2).sum(-1) - (probs * probs.log()).sum(-1) ** 2).mean().sqrt() / 10
    assert abs(likelihood - entropy) < 3 * spread


def test_images_of_a_model_without_llamagen_vq() -> None:
    pipe = tiny_pipeline()
    pipe.register_modules(text_encoder=None)
    with pytest.raises(ValueError, match="no `tokenizer` or no `text_encoder`"):
        PipelineConditioner(pipe).encode_prompts(PROMPTS)
    assert PipelineConditioner(pipe).num_tokens == tiny_llamagen().config.num_image_tokens
