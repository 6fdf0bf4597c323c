"""transformers' pipelines: the task of ours, and stock ones over an attached model."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import tiny_head, tiny_llama
from pipelines import seed, tiny_pipeline
from tiny_chameleon import tiny_anole, tiny_lumina, tiny_tokenizer
from tiny_chameleon import tiny_vq as tiny_chameleon_vq
from tiny_emu3 import emu3_processor, image_inputs, negative_inputs, tiny_emu3
from tiny_families import janus_processor, tiny_janus
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, pipeline
from transformers.pipelines import PIPELINE_REGISTRY

import lantern_hf
from lantern_hf import Emu3ImageLayout, LanternConfig, LanternTextToImagePipeline, attach

EXAMPLES = Path(__file__).parent.parent / "examples"
SIZE = {"height": 24, "width": 32}
TREE = LanternConfig(tree="chain_5", neighborhood_size=6, lam=3.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A saved target with its processor, and a saved head."""
    target, head = tmp_path_factory.mktemp("emu3"), tmp_path_factory.mktemp("head")
    model = tiny_emu3()
    model.save_pretrained(target)
    emu3_processor().save_pretrained(target)
    tiny_head(model).save_pretrained(head)
    return str(target), str(head)


@pytest.fixture(scope="module")
def emu3(folders: tuple[str, str]) -> Any:
    return pipeline("lantern-text-to-image", model=folders[0], assistant=folders[1], device="cpu", lantern_config=TREE)


def same(left: Any, right: Any) -> bool:
    return [image.tobytes() for image in left] == [image.tobytes() for image in right]


def values(image: Any) -> torch.Tensor:
    """Pixels of an image, `(H, W, 3)`."""
    return torch.from_numpy(np.array(image)).float()


def test_importing_the_package_enters_the_task() -> None:
    code = """
import sys, lantern_hf
assert "transformers" not in sys.modules
from transformers.pipelines import PIPELINE_REGISTRY
task = PIPELINE_REGISTRY.check_task("lantern-text-to-image")[1]
print([name for name in ("lantern_hf.attach", "diffusers") if name in sys.modules])
print(task["impl"].__module__, task["impl"].__name__)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["[]", "lantern_hf.transformers_pipeline LanternTextToImagePipeline"]


@pytest.mark.parametrize("first", ["lantern_hf.transformers_pipeline", "transformers.pipelines", "lantern_hf.pipeline"])
def test_modules_may_be_imported_in_any_order(first: str) -> None:
    code = f"""
import importlib, lantern_hf
importlib.import_module({first!r})
from transformers.pipelines import PIPELINE_REGISTRY
assert PIPELINE_REGISTRY.supported_tasks["lantern-text-to-image"]["impl"] is lantern_hf.LanternTextToImagePipeline
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_late_import_enters_the_task_as_well() -> None:
    del PIPELINE_REGISTRY.supported_tasks["lantern-text-to-image"]
    importlib.import_module("lantern_hf._registration").register_task()
    assert "lantern-text-to-image" in PIPELINE_REGISTRY.get_supported_tasks()


def test_a_prompt_gives_an_image(emu3: Any) -> None:
    assert isinstance(emu3, LanternTextToImagePipeline)
    image = emu3("a red fox", seed=0, **SIZE)
    assert isinstance(image, PIL.Image.Image)
    assert image.size == (32, 24)
    assert same([image], [emu3("a red fox", seed=0, **SIZE)])
    assert not same([image], [emu3("a red fox", seed=1, **SIZE)])
    (listed,) = emu3(["a red fox"], generator=seed(0), **SIZE)
    assert same([image], [listed])


def test_images_do_not_depend_on_the_batch(emu3: Any) -> None:
    prompts, wish = ["a red fox", "hi", "a"], {"negative_prompt": ["low", "x", "ugly"], "seed": 3, **SIZE}
    together = emu3(prompts, **wish)
    assert len(together) == 3
    assert same(together, emu3(prompts, batch_size=1, **wish))
    assert same(together, emu3(prompts, batch_size=2, **wish))
    generators = [seed(3), seed(4), seed(5)]
    assert same(together, emu3(prompts, generator=generators, negative_prompt=["low", "x", "ugly"], **SIZE))


def test_several_images_of_a_prompt(emu3: Any) -> None:
    pairs = emu3(["a red fox", "hi"], num_images_per_prompt=2, seed=0, guidance_scale=1, **SIZE)
    assert [len(pair) for pair in pairs] == [2, 2]
    assert not same(pairs[0][:1], pairs[0][1:])
    assert same(pairs[0], emu3("a red fox", num_images_per_prompt=2, seed=0, guidance_scale=1, **SIZE))


def test_prompts_may_come_as_a_stream(emu3: Any) -> None:
    images = emu3((text for text in ("a red fox", "hi")), seed=0, **SIZE)
    assert same(images, emu3(["a red fox", "hi"], seed=0, **SIZE))


def test_it_is_what_generate_draws(emu3: Any) -> None:
    processor, model = emu3.processor, emu3.model
    inputs = dict(image_inputs(processor, ["a red fox"], (24, 32)))
    layout = Emu3ImageLayout.for_model(model, inputs.pop("image_sizes"))
    output = model.generate(
        **inputs,
        **negative_inputs(processor, "", 1, (24, 32)),
        guidance_scale=3.0,
        top_k=2048,
        do_sample=True,
        max_new_tokens=layout.num_tokens,
        prefix_allowed_tokens_fn=layout,
        lantern_config=TREE,
        generator=seed(7),
    )
    pixels = model.decode_image_tokens(image_tokens=output[:, inputs["input_ids"].shape[1] :], height=3, width=4).clamp(
        -1, 1
    )
    expected = ((pixels[0] + 1) * 127.5).permute(1, 2, 0)
    assert (values(emu3("a red fox", seed=7, **SIZE)) - expected).abs().max() <= 0.51


def test_without_a_head_images_are_decoded_plainly(folders: tuple[str, str]) -> None:
    plain = pipeline("lantern-text-to-image", model=folders[0], device="cpu")
    passes: list[int] = []
    image = plain("a", do_sample=False, on_round=lambda session: passes.append(session.stats.passes), **SIZE)
    assert len(passes) == 3 * 5 + 3 - 1
    drafted = plain("a", do_sample=False, assistant=folders[1], lantern_config=LanternConfig.strict(), **SIZE)
    assert same([image], [drafted])
    settings = GenerationConfig(do_sample=False, pad_token_id=0)
    assert same([image], [plain("a", generation_config=settings, **SIZE)])
    with pytest.raises(ValueError, match="there is no draft head"):
        plain("a", lantern_config=TREE, **SIZE)


def test_what_cannot_be_honoured_is_refused(emu3: Any) -> None:
    with pytest.raises(ValueError, match="two sources of randomness"):
        emu3("a", seed=0, generator=seed(0), **SIZE)
    with pytest.raises(ValueError, match="`height` and `width` go together"):
        emu3("a", height=24)
    with pytest.raises(ValueError, match="has 1 texts for 2 prompts"):
        emu3(["a", "b"], negative_prompt=["low"], **SIZE)
    with pytest.raises(TypeError, match="must be a string or a list of strings"):
        emu3([3], **SIZE)
    with pytest.raises(ValueError, match="1 of 1 images are not complete"):
        emu3("a", max_new_tokens=5, **SIZE)
    with pytest.raises(ValueError, match="2 generators for 1 images"):
        emu3("a", generator=[seed(0), seed(1)], **SIZE)
    with pytest.raises(ValueError, match="takes one `generator`"):
        emu3((text for text in "ab"), generator=[seed(0), seed(1)], **SIZE)
    text = pipeline("lantern-text-to-image", model=tiny_llama(), tokenizer=words(), device="cpu")
    with pytest.raises(ValueError, match="makes no images from text alone"):
        text("w5")
    bare = pipeline("lantern-text-to-image", model=tiny_llama(), device="cpu")
    with pytest.raises(ValueError, match="need its processor"):
        bare("w5")


def test_llamagen_gives_the_images_of_its_own_pipeline() -> None:
    ours = tiny_pipeline()
    parts = {"tokenizer": ours.tokenizer, "text_encoder": ours.text_encoder, "vq_model": ours.vq_model}
    theirs = pipeline("lantern-text-to-image", model=ours.transformer, assistant=ours.draft_head, device="cpu", **parts)
    kwargs = {"guidance_scale": 2.0, "lantern_config": LanternConfig.strict()}
    expected = ours(["a red fox", "a bird"], generator=[seed(0), seed(1)], **kwargs).images
    for image, twin in zip(theirs(["a red fox", "a bird"], seed=0, top_k=0, **kwargs), expected, strict=True):
        # decoded one by one here and together there, which may round differently
        assert (values(image) - values(twin)).abs().max() <= 1
    with pytest.raises(ValueError, match="takes no `negative_prompt`"):
        theirs("a bird", negative_prompt="a fox")
    bare = pipeline("lantern-text-to-image", model=ours.transformer, device="cpu", tokenizer=ours.tokenizer)
    with pytest.raises(ValueError, match="holds no decoder of its codes. Pass `vq_model`"):
        bare("a bird")
    bare = pipeline("lantern-text-to-image", model=ours.transformer, device="cpu", vq_model=ours.vq_model)
    with pytest.raises(ValueError, match="no `tokenizer` or no `text_encoder`"):
        bare("a bird")


@pytest.mark.parametrize("name", ["anole", "lumina", "janus"])
def test_every_family_goes_from_prompt_to_image(name: str) -> None:
    model = {"anole": tiny_anole, "lumina": tiny_lumina, "janus": tiny_janus}[name]()
    parts = {"processor": janus_processor()} if name == "janus" else {"tokenizer": tiny_tokenizer()}
    if name != "janus":
        parts["vq_model"] = tiny_chameleon_vq(model)
    prompts = ["a red fox", "a bird"] if name == "janus" else ["word3", "word1 word2 word9"]
    pipe = pipeline("lantern-text-to-image", model=model, assistant=tiny_head(model), device="cpu", **parts)
    wish = {"seed": 0, "lantern_config": TREE} | ({"height": 8, "width": 12} if name == "lumina" else {})
    images = pipe(prompts, **wish)
    size = {"anole": (8, 8), "lumina": (12, 8), "janus": (16, 16)}[name]
    assert [image.size for image in images] == [size, size]
    assert same(images, pipe(prompts, batch_size=1, **wish))
    assert not same(images, pipe(prompts, negative_prompt=prompts[::-1], **wish))
    greedy = wish | {"do_sample": False, "lantern_config": None}
    plain = pipe(prompts, **greedy)
    assert same(plain, pipe(prompts, **greedy | {"lantern_config": LanternConfig.strict()}))
    again = pipeline("lantern-text-to-image", model=model, device="cpu", **parts)  # the head is still attached
    assert same(images, again(prompts, **wish))


def test_it_saves_what_it_loads(emu3: Any, folders: tuple[str, str], tmp_path: Path) -> None:
    emu3.save_pretrained(tmp_path)
    again = pipeline(
        "lantern-text-to-image", model=str(tmp_path), assistant=folders[1], lantern_config=TREE, device="cpu"
    )
    assert same([again("hi", seed=0, **SIZE)], [emu3("hi", seed=0, **SIZE)])


def test_a_saved_lumina_is_still_one(tmp_path: Path) -> None:
    """transformers writes Chameleon's name over the class that told it, in the saved and in the living model."""
    model, wish = tiny_lumina(), {"height": 8, "width": 12, "seed": 0}
    parts = {"tokenizer": tiny_tokenizer(), "vq_model": tiny_chameleon_vq(model), "device": "cpu"}
    pipe = pipeline("lantern-text-to-image", model=model, **parts)
    image = pipe("word3", **wish)
    pipe.save_pretrained(tmp_path)
    again = pipeline("lantern-text-to-image", model=str(tmp_path), **parts)
    assert same([image, image], [again("word3", **wish), pipe("word3", **wish)])


def words() -> PreTrainedTokenizerFast:
    """One id a word."""
    vocabulary = {"<pad>": 0, "<s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 40)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>")


def test_the_stock_text_pipeline_carries_a_head() -> None:
    model = tiny_llama()
    head = tiny_head(model)
    stock = pipeline("text-generation", model=model, tokenizer=words(), device="cpu")
    settings = {"do_sample": False, "max_new_tokens": 12}
    expected = stock(["w5 w6", "w7"], **settings)
    attach(model)
    seen: list[int] = []
    kwargs = {"assistant": head, "lantern_config": LanternConfig.strict(), "on_round": lambda s: seen.append(1)}
    assert stock(["w5 w6", "w7"], **settings, **kwargs) == expected
    assert seen
    held = pipeline("text-generation", model=model, tokenizer=words(), device="cpu", **kwargs)
    seen.clear()
    assert held(["w5 w6", "w7"], **settings) == expected
    assert seen
    attach(model, head, LanternConfig.strict(), default_on=True)
    assert stock(["w5 w6", "w7"], **settings) == expected


def test_the_stock_any_to_any_pipeline_carries_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text from end to end, images up to the codes: upstream's way from pixels to PIL needs torchvision, as all of it
    says it does; the check for it is taken out, since nothing else here needs it."""
    monkeypatch.setattr("transformers.pipelines.any_to_any.requires_backends", lambda *arguments: None)
    model, processor = tiny_janus(), janus_processor()
    stock = pipeline("any-to-any", model=model, processor=processor, device="cpu")
    settings = {"do_sample": False, "max_new_tokens": 6}
    expected = stock(text="a red fox", generate_kwargs=settings)
    prompt = {"text": "a red fox", **processor(text=["a red fox"], generation_mode="image", return_tensors="pt")}
    image = {"generation_mode": "image", "do_sample": False, "guidance_scale": 3.0}
    codes = stock.forward(dict(prompt), generate_kwargs=image)["generated_sequence"]
    attach(model)
    seen: list[int] = []
    head = {
        "assistant": tiny_head(model),
        "lantern_config": LanternConfig.strict("chain_5"),
        "on_round": lambda session: seen.append(session.stats.passes),
    }
    assert stock(text="a red fox", generate_kwargs=settings | head) == expected
    assert 0 < len(seen) <= 5
    seen.clear()
    assert torch.equal(stock.forward(dict(prompt), generate_kwargs=image | head)["generated_sequence"], codes)
    assert 0 < len(seen) <= codes.shape[1] - 1


@pytest.mark.parametrize("name", ["emu3", "transformers_pipeline"])
def test_the_example_runs(name: str, folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    script = importlib.import_module(name)
    where = ["--model", folders[0], "--head", folders[1], "--out"]
    if name == "emu3":
        negative = ["--negative-prompt", "low", "--area", "1024", "--ratio", "4:1"]
        files = [script.main(["a red fox", *where, str(tmp_path / "fox.png"), *negative])]
        size = (64, 16)
    else:
        files = script.main(["a fox", "hi", *where, str(tmp_path / "out"), "--size", "24", "32", "--batch-size", "2"])
        size = (32, 24)
    assert len(files) == (1 if name == "emu3" else 2)
    for file in files:
        with PIL.Image.open(file) as image:
            assert image.size == size


def test_the_package_lists_the_pipeline() -> None:
    assert lantern_hf.LanternTextToImagePipeline is LanternTextToImagePipeline
