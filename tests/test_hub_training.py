"""Cards filled from the trainer's own record: what it holds is shown, what it does not hold is not claimed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_head, tiny_llamagen
from fake_hub import CLIENT_WARNING, connect, validate
from pipelines import tiny_pipeline
from tiny import STEPS, random_data, read_log
from transformers import PreTrainedModel
from typer.testing import CliRunner

from lantern_hf import LanternDraftModel
from lantern_hf._hub_training import TrainingRecord
from lantern_hf.cli import app
from lantern_hf.hub import CardDetails, push_folder, write_card
from lantern_hf.training import ConditionedSequences, TrainingConfig, train_head

pytestmark = CLIENT_WARNING
SETTINGS: dict[str, Any] = {"unroll_steps": 2, "warmup_steps": 0, "tree": "narrow_8", **STEPS}
RECORD = {"format": "lantern_hf.training/1", "sequences": 8, "steps": 4, "global_batch": 4, "processes": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, LanternDraftModel, Path]:
    target, folder = tiny_llamagen(), tmp_path_factory.mktemp("trained")
    data = random_data(target)
    config = TrainingConfig(steps=4, gradient_accumulation=2, **SETTINGS)
    head = train_head(target, data, config, output_dir=folder, eval_dataset=random_data(target, 3))
    return target, head, folder


def section(card: str) -> str:
    """What a card says of the training."""
    return card.split("## Training\n\n")[1].split("\n\n## ")[0]


def test_the_card_shows_what_the_trainer_measured(trained: Any) -> None:
    _, _, folder = trained
    text = write_card(folder, "me/head").read_text()
    assert validate(text).status_code == 200
    last = read_log(folder)[-1]
    depths = " | ".join(f"{last[name]:.3f}" for name in ("eval_overlap", *(f"eval_overlap_{d}" for d in range(2, 6))))
    shown = section(text)
    assert shown.startswith("The training data were not stated.")  # the trainer was given numbers, not where from
    assert "| sequences | 8 |" in shown
    assert "| steps | 4 of 8 sequences, 4 passes over the data |" in shown
    assert "| settings | `lr=0.003`, `warmup_steps=0`, `max_grad_norm=1.0`, `unroll_steps=2` |" in shown
    assert "on 3 sequences kept for evaluation, without guidance:" in shown
    assert f"| depth | 1 | 2 | 3 | 4 | 5 |\n|---|---:|---:|---:|---:|---:|\n| sum min(p, q) | {depths} |" in shown
    assert f"with `narrow_8`: {last['eval_tokens_per_pass']:.2f}." in shown
    stated = section(write_card(folder, "me/head", CardDetails(training_data="Noise.")).read_text())
    assert stated.startswith("Noise.")
    assert "not stated" not in stated
    assert "| sequences | 8 |" in stated


def test_a_push_fills_the_section(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the folder; from Python, as long as the head is the one that was trained; or as the record is named."""
    target, head, folder = trained
    changed, other = LanternDraftModel.from_pretrained(folder).bfloat16(), tiny_head(target)
    with connect(monkeypatch, tmp_path / "cache") as hub:
        push_folder(folder, "me/folder")
        head.push_to_hub("me/trained")
        LanternDraftModel.from_pretrained(folder).push_to_hub("me/loaded")
        changed.push_to_hub("me/named", card=CardDetails(training=folder))
        assert not caplog.records
        changed.push_to_hub("me/changed")
        assert "of these in another dtype" in caplog.text
        other.push_to_hub("me/other")
        cards = {name.removeprefix("me/"): section(repo["README.md"].decode()) for name, repo in hub.repos.items()}
    shown, silent = cards.pop("folder"), (cards.pop("changed"), cards.pop("other"))
    assert "| sequences | 8 |" in shown
    assert cards == dict.fromkeys(("trained", "loaded", "named"), shown)
    assert silent == ("The training data were not stated.",) * 2


def test_a_record_of_other_weights_is_not_shown(trained: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target, _, folder = trained
    tiny_head(target).save_pretrained(tmp_path)
    (tmp_path / "training.json").write_bytes((folder / "training.json").read_bytes())
    with caplog.at_level(logging.WARNING):
        assert section(write_card(tmp_path, "me/head").read_text()) == "The training data were not stated."
    assert "training.json is of other weights than this head" in caplog.text


def test_a_training_that_goes_on_is_recorded_anew(tmp_path: Path) -> None:
    target = tiny_llamagen()
    data = ConditionedSequences([dict(item) for item in random_data(target)], source=["noise"])
    for steps, evaluated in ((2, data), (3, None)):
        config = TrainingConfig(steps=steps, schedule="constant", **SETTINGS)
        train_head(target, data, config, output_dir=tmp_path, eval_dataset=evaluated)
        record = TrainingRecord.of_head(tmp_path, [tmp_path / "model.safetensors"])
        assert record is not None
        assert (record.steps, record.source, bool(record.evaluation)) == (steps, ("noise",), evaluated is not None)
    assert "sum min(p, q)" not in record.text()  # of step 2, and this is the head of step 3


def test_the_command_says_what_the_data_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_pipeline().save_pretrained("pipe")
    Path("prompts.txt").write_text("red fox\nblue bird\n")
    rows = [{"prompt": "red fox", "tokens": [1, 2, 3, 4, 5, 6]}] * 3
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for line in (
        "distil --model pipe --prompts prompts.txt --output-dir drawn --max-new-tokens 6 --top-k 9",
        "train --model pipe --data drawn --data own.jsonl --steps 1 --eval-sequences 1 --output-dir head",
        "card head me/head",
    ):
        result = CliRunner().invoke(app, line.split())
        assert result.exit_code == 0, result.stderr
    shown = section(Path("head/README.md").read_text())
    drawn = "drawn by a model with lantern-hf distil (guidance_scale 2.0, top_k 9, top_p 1.0, temperature 1.0)"
    assert f"| sequences | 4: {drawn}; token sequences |" in shown
    assert "not stated" not in shown
    assert str(tmp_path) not in shown


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": "x"}, "format 'x', expected 'lantern_hf.training/1'"),
        (RECORD | {"steps": 0}, "`steps` must be a whole number of at least 1, got '0'"),
        (RECORD | {"sequences": "many"}, "`sequences` must be a whole number"),
        (RECORD | {"settings": [1]}, "`settings` must hold"),
        (RECORD | {"source": "x"}, "`source` must be a list"),
        (RECORD | {"evaluation": {"metrics": {"overlap": True}, "sequences": 1}}, "`overlap` must be a finite number"),
        (RECORD | {"evaluation": {"metrics": {"overlap": 0.5}}}, "`sequences` must be a whole number"),
        (RECORD | {"evaluation": {"metrics": dict.fromkeys(map(str, range(99)), 0.5)}}, "at most 64 named values"),
    ],
)
def test_what_is_no_record_is_refused(values: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(json.dumps(values))
    for source in (values, tmp_path, tmp_path / "training.json"):
        with pytest.raises(ValueError, match=f"no record of a training: .*{message}"):
            TrainingRecord.read(source)


def test_markup_in_a_record_stays_text() -> None:
    bad = "a|b\n## <script>`x`"
    record = RECORD | {"source": [bad], "settings": {bad: bad}, "lantern_version": bad}
    text = TrainingRecord.read(record).text()
    assert not set("<>") & set(text)
    assert "\n#" not in text
    assert len(text.splitlines()) == 6
