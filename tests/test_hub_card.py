"""Cards: metadata that the Hub takes, figures from a result file, and a person's words that stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest
import yaml
from conftest import tiny_chameleon, tiny_head, tiny_llama
from fake_hub import CLIENT_WARNING, FakeHub, FakeRepo, connect, validate
from huggingface_hub import ModelCard

from lantern_hf._hub_card import BEGIN, END, merge_card
from lantern_hf._hub_results import Benchmark
from lantern_hf.hub import CardDetails, write_card

pytestmark = CLIENT_WARNING

# As examples/emoji/benchmark.py writes it.
RESULT = {
    "machine": {"cpu": "x86_64", "threads": 2, "torch": "2.13.0"},
    "seed": 0,
    "guidance": 3.0,
    "dtype": "float32",
    "steps": {
        "plain": {"tokens_per_pass": 1.0, "relaxed_tv_per_token": 0.0, "acceptance_per_depth": []},
        "eagle_25 strict": {"tokens_per_pass": 2.34567, "relaxed_tv_per_token": 0.0, "acceptance_per_depth": [0.7]},
        "eagle_25 lam 3 k 10": {"tokens_per_pass": 2.9, "relaxed_tv_per_token": 0.0421},
    },
    "seconds": {"plain": {"median": 2.0, "all": [2.0]}, "eagle_25 strict": {"median": 1.0, "all": [1.0]}},
    "speed_over_plain": {"eagle_25 strict": {"median": 2.0, "q25": 1.9, "q75": 2.125, "min": 1.5, "max": 2.5}},
}
FULL = {
    "license": "apache-2.0",
    "datasets": ["someone/pictures"],
    "training_data": "Ten thousand drawings.",
    "training_command": "lantern-hf train --target someone/anole",
    "tags": ("anole",),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub without a network."""
    with connect(monkeypatch, tmp_path / "cache") as fake:
        yield fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head for the tiny Chameleon."""
    head = tiny_head(tiny_chameleon())
    name = "ChameleonForConditionalGeneration"
    head.config.verifier = {"name_or_path": "someone/anole", "architectures": [name]}
    head.save_pretrained(tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A small PNG."""
    PIL.Image.new("RGB", (4, 4), "red").save(tmp_path / "fox.PNG")
    return tmp_path / "fox.PNG"


def test_metadata_and_text(folder: Path, picture: Path, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    details = CardDetails(benchmark=tmp_path / "result.json", image=picture, **FULL)
    text = write_card(folder, "me/anole-lantern-head", details).read_text()
    assert validate(text).status_code == 200
    data = yaml.safe_load(text.split("---")[1])
    index = data.pop("model-index")
    assert data == {
        "base_model": "someone/anole",
        "base_model_relation": "adapter",
        "datasets": ["someone/pictures"],
        "library_name": "lantern_hf",
        "license": "apache-2.0",
        "pipeline_tag": "text-to-image",
        "tags": ["lantern", "speculative-decoding", "anole"],
    }
    (results,) = [model["results"] for model in index if model["name"] == "anole-lantern-head"]
    metrics = [(metric["type"], metric["name"], metric["value"]) for metric in results[0]["metrics"]]
    assert metrics == [
        ("tokens_per_pass", "Tokens per target pass, plain", 1.0),
        ("tokens_per_pass", "Tokens per target pass, eagle_25 strict", 2.3457),
        ("speed_over_plain", "Speed over plain decoding, median, eagle_25 strict", 2.0),
        ("tokens_per_pass", "Tokens per target pass, eagle_25 lam 3 k 10", 2.9),
    ]
    assert "| `eagle_25 strict` | 2.35 | 0.000 | 1.00 | 2.00 (1.90-2.12) |" in text
    assert "| `eagle_25 lam 3 k 10` | 2.90 | 0.042 |  |  |" in text
    assert "guidance 3.0, seed 0" in text
    assert "Ten thousand drawings." in text
    assert "```bash\nlantern-hf train --target someone/anole\n```" in text
    assert "![Drawn with anole-lantern-head](picture.png)" in text
    assert (folder / "picture.png").read_bytes() == picture.read_bytes()
    usage = text.split("```python\n")[1].split("```")[0]
    assert usage.splitlines() == [
        "import lantern_hf",
        "from transformers import ChameleonForConditionalGeneration",
        "",
        'model = lantern_hf.attach(ChameleonForConditionalGeneration.from_pretrained("someone/anole"))',
        'tokens = model.generate(**inputs, assistant="me/anole-lantern-head", do_sample=True, max_new_tokens=1024)',
    ]
    compile(usage, "usage", "exec")
    assert 'custom_generate="me/anole-lantern-head", trust_remote_code=True' in text


def test_nothing_is_claimed_that_is_not_known(folder: Path) -> None:
    text = write_card(folder, "me/head").read_text()
    assert validate(text).status_code == 200
    assert "Not measured" in text
    assert "Not stated; ask the author" in text
    assert "training data were not stated" in text
    assert not {"license", "model-index", "datasets"} & ModelCard(text).data.to_dict().keys()


def test_a_text_model_is_another_task(tmp_path: Path) -> None:
    tiny_head(tiny_llama()).save_pretrained(tmp_path)
    assert ModelCard(write_card(tmp_path, "me/head").read_text()).data.pipeline_tag == "text-generation"


def test_a_persons_words_stay(folder: Path) -> None:
    first = write_card(folder, "me/head", CardDetails(license="mit", tags=["mine"])).read_text()
    edited = first.replace("license: mit", "license: openrail\nlanguage: en\nco2_eq_emissions: 3")
    edited = edited.replace("- mine", "- mine\n- theirs").replace(BEGIN, f"A word before.\n\n{BEGIN}")
    (folder / "README.md").write_text(edited + "\nA word after.\n")
    text = write_card(folder, "me/head", CardDetails(training_data="New data.")).read_text()
    data = ModelCard(text).data.to_dict()
    assert (data["license"], data["language"], data["co2_eq_emissions"]) == ("openrail", "en", 3)
    assert data["tags"] == ["lantern", "speculative-decoding", "mine", "theirs"]
    assert text.index("A word before.") < text.index(BEGIN) < text.index("New data.") < text.index(END)
    assert text.rstrip().endswith("A word after.")
    assert write_card(folder, "me/head", CardDetails(training_data="New data.")).read_text() == text  # and it settles


def test_a_card_without_marks_keeps_its_text(folder: Path) -> None:
    (folder / "README.md").write_text("# My own title\n\nMy own words.\n")
    text = write_card(folder, "me/head").read_text()
    assert text.index(END) < text.index("# My own title") < text.index("My own words.")
    assert write_card(folder, "me/head").read_text() == text


def test_a_push_keeps_what_a_person_wrote_on_the_hub(hub: FakeHub) -> None:
    head = tiny_head(tiny_llama())
    head.push_to_hub("me/head", card=CardDetails(license="mit"))
    repo = hub.repos["me/head"]
    repo["README.md"] = repo["README.md"] + b"\nWritten on the Hub.\n"
    head.config.verifier = {"name_or_path": "someone/llama", "architectures": None}
    head.push_to_hub("me/head", card=CardDetails(benchmark=RESULT), tags=["new"])
    text = repo["README.md"].decode()
    assert text.endswith("Written on the Hub.\n")
    data = ModelCard(text).data
    assert (data.license, data.base_model) == ("mit", "someone/llama")
    assert data.tags == ["lantern", "speculative-decoding", "new"]
    assert len(data.eval_results) == 4
    hub.repos["me/broken"] = FakeRepo({"README.md": b"---\ntags: [\n---\n"})
    with pytest.raises(ValueError, match="metadata cannot be read"):
        head.push_to_hub("me/broken")
    assert len(hub.repos["me/broken"].log) == 1


def test_a_picture_is_pushed(hub: FakeHub, picture: Path) -> None:
    tiny_head(tiny_llama()).push_to_hub("me/head", card=CardDetails(image=picture))
    assert hub.repos["me/head"]["picture.png"] == picture.read_bytes()


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("---\ntags: [\n---\n", "metadata cannot be read"),
        ("---\n- a\n- b\n---\n", "must be `key: value` lines"),
        ("---\nlicense: mit\n\n# no end\n", "not closed"),
        ("---\nx: &a [*a]\n" + "---\n" + BEGIN, "marks are damaged: 1 times"),
        (f"{END}\n{BEGIN}\n", "marks are damaged"),
        (f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n", "marks are damaged: 2 times"),
        ("---\nx: !!python/object/apply:os.system [id]\n---\n", "metadata cannot be read"),
        ("a" * 2**21, "2,097,152 characters, where at most"),
    ],
)
def test_broken_cards_are_refused(card: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        merge_card(card, {"tags": ["lantern"]}, f"{BEGIN}\n{END}\n")
    assert "\n" not in str(caught.value)


def step(**values: object) -> dict:
    return {"steps": {"a": {"tokens_per_pass": 2.0, **values}}}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({}, "it has no `steps`"),
        ({"steps": []}, "it has no `steps`"),
        ({"steps": {f"a{i}": {} for i in range(1000)}}, "1 to 500 ways"),
        ({"steps": {"a": 3}}, "must be an object"),
        ({"steps": {"a": {}}}, "'a' has no `tokens_per_pass`"),
        ({"steps": {"a|b\n": {}}}, "names no way of decoding"),
        (step(tokens_per_pass="fast"), "must be a number of at least 0, got 'fast'"),
        (step(tokens_per_pass=float("nan")), "got 'nan'"),
        (step(tokens_per_pass=True), "got 'True'"),
        (step(relaxed_tv_per_token=-1), "must be a number of at least 0"),
        (step() | {"seconds": {"a": {"median": 1e999}}}, "got 'inf'"),
    ],
)
def test_broken_results_are_refused(result: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result))
    for source in (result, tmp_path / "result.json"):
        with pytest.raises(ValueError, match=message):
            Benchmark.read(source)


def test_result_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file"):
        Benchmark.read(tmp_path / "absent.json")
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not valid JSON"):
        Benchmark.read(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        Benchmark.read(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("details", "message"),
    [
        ({"license": "Apache 2"}, "`license` must be an identifier"),
        ({"license": "other"}, "needs `license_name` and `license_link`"),
        ({"base_model": "just-a-name"}, "`base_model` must be a Hub id"),
        ({"datasets": ["a/b", "../c/d"]}, "`datasets` must be a Hub id"),
        ({"tags": ["a\nb"]}, "`tags` must be short printable strings"),
        ({"image": "absent.png"}, "`image` must be a file"),
    ],
)
def test_unsound_details_are_refused(details: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CardDetails(**details)


def test_pictures_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"GIF89a")
    (tmp_path / "a.svg").write_bytes(b"<svg onload=alert(1)>")
    for name in ("a.png", "a.svg"):
        with pytest.raises(ValueError, match="must be a PNG, JPEG or WebP picture"):
            CardDetails(image=tmp_path / name)
