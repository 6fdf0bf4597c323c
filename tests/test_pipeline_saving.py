"""`LanternPipeline` of every family as a folder: another process draws the same images from it; so does the Hub."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from conftest import tiny_head
from fake_hub import CLIENT_WARNING, FakeHub, connect
from family_pipelines import BY_NAME, DRAWERS, TREE
from huggingface_hub import ModelCard
from tiny_families import glm_image_processor, tiny_glm_image

from lantern_hf import LanternPipeline
from lantern_hf.targets import adapter_class

STRANGER = """
import json, sys
from pathlib import Path

import torch

from lantern_hf import LanternPipeline

for folder in sys.argv[1:]:
    wish = json.loads(Path(folder, "wish.json").read_text())
    pipe = LanternPipeline.from_pretrained(folder)
    pipe.enable_progress(False)
    output = pipe(wish.pop("prompts"), generator=torch.Generator().manual_seed(0), **wish)
    torch.save({"codes": output.codes, "passes": output.stats.passes}, Path(folder, "codes.pt"))
    if wish.get("output_type") != "latent":
        for number, image in enumerate(output.images):
            image.save(Path(folder, f"{number}.png"))
"""


def test_another_process_draws_the_same_images(tmp_path: Path) -> None:
    """All families in one process, since it is importing that takes long."""
    outputs = {}
    for drawer in DRAWERS:
        pipe = drawer.pipe(lantern_config=TREE)
        outputs[drawer.name] = drawer.draw(pipe, lantern_config="default")
        pipe.save_pretrained(tmp_path / drawer.name)
        wish = {"prompts": list(drawer.prompts)} | drawer.wish
        (tmp_path / drawer.name / "wish.json").write_text(json.dumps(wish))
    prior = tiny_glm_image()
    pipe = LanternPipeline.from_target(prior, glm_image_processor())
    pipe.enable_progress(False)
    wish = {"height": 32, "width": 64, "output_type": "latent"}
    outputs["glm_image"] = pipe("a red fox", generator=torch.Generator().manual_seed(0), **wish)
    pipe.save_pretrained(tmp_path / "glm_image")
    (tmp_path / "glm_image" / "wish.json").write_text(json.dumps(wish | {"prompts": "a red fox"}))
    folders = [str(tmp_path / name) for name in outputs]
    subprocess.run([sys.executable, "-W", "error", "-c", STRANGER, *folders], check=True)
    for name, output in outputs.items():
        found = torch.load(tmp_path / name / "codes.pt")
        assert torch.equal(found["codes"], output.codes), name
        assert found["passes"] == output.stats.passes
        if name in BY_NAME:
            files = [tmp_path / name / f"{number}.png" for number in range(2)]
            images = [diffusers.utils.load_image(str(file)) for file in files]
            assert [image.tobytes() for image in images] == [image.tobytes() for image in output.images]


@pytest.mark.parametrize("name", [*BY_NAME, "glm_image"])
def test_the_index_names_classes_that_can_be_found(name: str, tmp_path: Path) -> None:
    if name == "glm_image":
        pipe = LanternPipeline.from_target(tiny_glm_image(), glm_image_processor())
    else:
        pipe = BY_NAME[name].pipe()
    family = adapter_class(pipe.transformer).family
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    components = {part: value for part, value in index.items() if isinstance(value, list)}
    assert set(components) == {"transformer", "vq_model", "tokenizer", "text_encoder", "draft_head", "processor"}
    places = {"transformers": transformers, "diffusers": diffusers}
    for part, (library, class_name) in components.items():
        assert (library is None) is (getattr(pipe, part) is None)
        if library in places:
            assert hasattr(places[library], class_name)
        elif library is not None:
            assert (part, library, class_name) == ("draft_head", "lantern_hf.draft", "LanternDraftModel")
    assert components["transformer"][0] == "transformers"
    loaded = LanternPipeline.from_pretrained(tmp_path)
    assert adapter_class(loaded.transformer).family == family  # which Lumina's class alone does not tell
    assert loaded._adapter.family == pipe._adapter.family == family
    assert loaded.config.guidance_scale == pipe.config.guidance_scale
    assert loaded.config.top_k == pipe.config.top_k


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub without a network."""
    with connect(monkeypatch, tmp_path / "cache") as fake:
        yield fake


@CLIENT_WARNING
@pytest.mark.parametrize("name", ["lumina", "janus"])
def test_push_and_pull(name: str, hub: FakeHub) -> None:
    drawer = BY_NAME[name]
    pipe = drawer.pipe()
    expected = drawer.draw(pipe)
    pipe.push_to_hub("me/pipe")
    card = ModelCard(hub.repos["me/pipe"]["README.md"].decode())
    assert card.data.pipeline_tag == "text-to-image"
    assert ("4 x 4 codes of 24" if name == "janus" else "codes of 24") in card.text
    loaded = LanternPipeline.from_pretrained("me/pipe")
    loaded.enable_progress(False)
    assert torch.equal(loaded.draft_head.neighbors.indices, pipe.draft_head.neighbors.indices)
    assert torch.equal(drawer.draw(loaded).codes, expected.codes)


@pytest.mark.parametrize("name", ["emu3", "anole"])
def test_the_users_script(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint to images and a folder, then from that folder to the same images."""
    drawer = BY_NAME[name]
    model = drawer.make()
    model.save_pretrained(tmp_path / "model")
    drawer.processor().save_pretrained(tmp_path / "model")
    tiny_head(model).save_pretrained(tmp_path / "head")
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    script = importlib.import_module("diffusers_pipeline")
    wish = [*drawer.prompts, "--images", "2", "--seed", "3"]
    wish += ["--size", str(drawer.wish["height"]), str(drawer.wish["width"])] if drawer.wish else []
    places = ["--model", str(tmp_path / "model"), "--head", str(tmp_path / "head"), "--save", str(tmp_path / "pipe")]
    if name == "anole":
        drawer.decoder(model).save_pretrained(tmp_path / "vq")
        places += ["--vq", str(tmp_path / "vq")]
    files = script.main([*wish, *places, "--out", str(tmp_path / "out")])
    again = script.main([*wish, "--pipeline", str(tmp_path / "pipe"), "--out", str(tmp_path / "again")])
    assert len(files) == 4
    for file, twin in zip(files, again, strict=True):
        assert diffusers.utils.load_image(str(file)).size == drawer.size
        assert file.read_bytes() == twin.read_bytes()
