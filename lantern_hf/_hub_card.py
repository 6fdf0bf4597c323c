"""The card of a draft head or a pipeline: metadata for the Hub, and a text for people.

Plain values in, text out. What we write stands between two marks; everything a person writes around them, and every
metadata key that we do not set, is kept when a card is written again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import yaml_dump

from lantern_hf._hub_results import Benchmark, plain_text
from lantern_hf._hub_training import TrainingRecord

__all__ = ["BEGIN", "END", "CardDetails", "card_text", "check_card", "is_hub_id", "merge_card"]

BEGIN = "<!-- lantern_hf begins: this part is written anew by every push; write above or below it -->"
END = "<!-- lantern_hf ends -->"
TAGS = ("lantern", "speculative-decoding")

_MAX_CARD = 2**20
_MAX_IMAGE = 2**24
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
_IMAGES = {".png": b"\x89PNG\r\n\x1a\n", ".jpg": b"\xff\xd8\xff", ".jpeg": b"\xff\xd8\xff", ".webp": b"RIFF"}


@dataclass(frozen=True, kw_only=True)
class CardDetails:
    """What a card says beyond what the files themselves tell.

    Args:
        license: Identifier as the Hub knows it, such as `apache-2.0`; `other` needs the next two.
        license_name: Name of a licence of its own.
        license_link: Link to it.
        base_model: Hub id of the target. Default: the one the head was trained for, if it has a Hub id.
        pipeline_tag: Task on the Hub. Default: `text-to-image`, or `text-generation` for a target without codebook.
        tags: Tags besides `lantern` and `speculative-decoding`.
        datasets: Hub ids of training data.
        training_data: What it was trained on, in words.
        training_command: Command that trained it.
        training: Record of the training, `training.json`, the folder that holds it, or its values. Default: the record
            in the folder that the head lies in or came from, if there is one and it is of these very weights.
        benchmark: Benchmark result file, or its values; the card's figures come from nowhere else.
        image: Picture to show, a PNG, JPEG or WebP file; it is uploaded with the card.

    Raises:
        ValueError: A value is of no use on the Hub.
    """

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    base_model: str | None = None
    pipeline_tag: str | None = None
    tags: Sequence[str] = ()
    datasets: Sequence[str] = ()
    training_data: str | None = None
    training_command: str | None = None
    training: str | os.PathLike[str] | Mapping[str, Any] | TrainingRecord | None = None
    benchmark: str | os.PathLike[str] | Mapping[str, Any] | None = None
    image: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.license is not None and not _LICENSE.fullmatch(self.license):
            raise ValueError(f"`license` must be an identifier such as 'apache-2.0', got {self.license[:80]!r}.")
        if self.license == "other" and not (self.license_name and self.license_link):
            raise ValueError("`license='other'` needs `license_name` and `license_link`.")
        for name in ("base_model", *(["datasets"] if self.datasets else [])):
            ids = getattr(self, name)
            for value in [ids] if isinstance(ids, str) else ids or []:
                if not is_hub_id(value):
                    raise ValueError(f"`{name}` must be a Hub id such as 'leloy/Anole-7b-v0.1-hf', got {value!r}.")
        for tag in self.tags:
            if not isinstance(tag, str) or not 0 < len(tag) <= 100 or not tag.isprintable():
                raise ValueError(f"`tags` must be short printable strings, got {str(tag)[:80]!r}.")
        if self.image is not None:
            check_image(Path(self.image))

    @property
    def image_name(self) -> str | None:
        """Name of the picture in the repository."""
        return None if self.image is None else f"picture{Path(self.image).suffix.lower()}"


def is_hub_id(name: object) -> bool:
    """Whether a name can be `user/model` on the Hub."""
    return isinstance(name, str) and bool(_HUB_ID.fullmatch(name)) and not re.search(r"--|\.\.|[-.](/|$)", name)


def check_image(path: Path) -> None:
    """Refuse a picture that is none; only its first bytes are read.

    Raises:
        ValueError: It is missing, too large or of another format.
    """
    if not path.is_file():
        raise ValueError(f"`image` must be a file, there is none at {str(path)!r}.")
    magic = _IMAGES.get(path.suffix.lower())
    with path.open("rb") as file:
        start = file.read(8)
    if magic is None or not start.startswith(magic):
        raise ValueError(f"`image` must be a PNG, JPEG or WebP picture named as such, {str(path)!r} is not.")
    if path.stat().st_size > _MAX_IMAGE:
        raise ValueError(f"`image` must have at most {_MAX_IMAGE:,} bytes, {str(path)!r} has {path.stat().st_size:,}.")


def card_text(
    repo_id: str,
    details: CardDetails,
    *,
    base_model: str | None,
    pipeline_tag: str,
    summary: str,
    usage: str,
    facts: Mapping[str, str],
) -> tuple[dict[str, Any], str]:
    """Write a card.

    Args:
        repo_id: Hub id the card is for.
        details: What the author says.
        base_model: Hub id of the target, where the files name one; the details win.
        pipeline_tag: Task; the details win.
        summary: What this is, a sentence or two.
        usage: How to use it, Markdown.
        facts: Rows of the table of facts.

    Returns:
        Metadata, and the text between the marks.

    Raises:
        ValueError: The benchmark is no result file, or the training no record of one.
    """
    task = details.pipeline_tag or pipeline_tag
    benchmark = None if details.benchmark is None else Benchmark.read(details.benchmark)
    base_model = details.base_model or base_model
    name = repo_id.split("/")[-1]
    data = ModelCardData(
        license=details.license,
        license_name=details.license_name,
        license_link=details.license_link,
        library_name="lantern_hf",
        pipeline_tag=task,
        base_model=base_model,
        base_model_relation=None if base_model is None else "adapter",
        tags=[*TAGS, *details.tags],
        datasets=list(details.datasets) or None,
        model_name=None if benchmark is None else name,
        eval_results=None if benchmark is None else benchmark.eval_results(task),
    )
    table = "\n".join(f"| {key} | {plain_text(value)} |" for key, value in facts.items())
    parts = [BEGIN, f"# {name}", summary]
    if details.image_name is not None:
        parts.append(f"![Drawn with {name}]({details.image_name})")
    parts += ["## Use", usage, "## What it is", f"| | |\n|---|---|\n{table}", "## Training", _training(details)]
    parts += ["## Measured", _measured(benchmark), "## Licence", _licence(details), END]
    return data.to_dict(), "\n\n".join(parts) + "\n"


def merge_card(existing: str | None, metadata: Mapping[str, Any], block: str) -> str:
    """Put what we write into a card that may have been edited.

    Args:
        existing: The card as it is, None for a new one.
        metadata: Our metadata; it wins key by key, tags are joined, keys we do not set stay.
        block: Our text, marks included; it replaces the marked part, or goes before the text of a card without marks.

    Returns:
        The card.

    Raises:
        ValueError: The card's metadata or marks are broken, so that something a person wrote would be lost.
    """
    if existing is None:
        return _join(dict(metadata), block)
    if len(existing) > _MAX_CARD:
        raise ValueError(f"The card has {len(existing):,} characters, where at most {_MAX_CARD:,} make sense.")
    old, text = _split(existing)
    merged = {**old, **metadata}
    for key in ("tags", "datasets"):
        if isinstance(old.get(key), list) and key in metadata:
            merged[key] = list(dict.fromkeys([*metadata[key], *map(str, old[key])]))
    begins, ends = text.count(BEGIN), text.count(END)
    if (begins, ends) == (0, 0):
        return _join(merged, f"{block}\n{text.lstrip()}" if text.strip() else block)
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if (begins, ends) != (1, 1) or END in before:
        raise ValueError(
            f"The card's marks are damaged: {begins} times {BEGIN[:24]!r}..., {ends} times {END!r}, in order once each "
            "is expected. Put them right, or remove both."
        )
    return _join(merged, f"{before}{block.rstrip()}{after}")


def check_card(text: str) -> None:
    """Check a card as far as that goes without the Hub: the metadata read back as the client reads them.

    Raises:
        ValueError: The client would not read it, or it names what the Hub does not know.
    """
    try:
        data = ModelCard(text).data
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"The card is not valid: {' '.join(str(error).split())[:400]}") from error
    for key, kinds in {"tags": list, "datasets": list | str, "license": str | list, "pipeline_tag": str}.items():
        value = data.get(key)
        if value is not None and not isinstance(value, kinds):
            raise ValueError(f"The card is not valid: `{key}` is {str(value)[:80]!r}.")


def _split(card: str) -> tuple[dict[str, Any], str]:
    """Metadata and text of a card."""
    match = REGEX_YAML_BLOCK.search(card)
    if match is None:
        if card.lstrip().startswith("---\n"):
            raise ValueError("The card's metadata cannot be read: its block is not closed by a line of `---`.")
        return {}, card
    try:
        data = yaml.safe_load(match.group(2))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"The card's metadata cannot be read: {reason}. Put the YAML at its top right.") from error
    if not isinstance(data, dict | None):
        raise ValueError(f"The card's metadata cannot be read: it must be `key: value` lines, not {str(data)[:40]!r}.")
    return data or {}, card[match.end() :]


def _join(metadata: dict[str, Any], text: str) -> str:
    """A card of metadata and text, as the Hub's client writes it."""
    return f"---\n{yaml_dump(metadata, sort_keys=False).strip()}\n---\n\n{text.strip()}\n"


def _training(details: CardDetails) -> str:
    """What is known of the training."""
    training = details.training
    record = training if isinstance(training, TrainingRecord | None) else TrainingRecord.read(training)
    lines = [details.training_data] if details.training_data else []
    lines += [record.text()] if record is not None else []
    if not details.training_data and not (record is not None and record.source):
        lines.insert(0, "The training data were not stated.")
    if details.training_command is not None:
        fence = "```" if "```" not in details.training_command else "~~~~~~"
        lines.append(f"{fence}bash\n{details.training_command.strip()}\n{fence}")
    return "\n\n".join(lines)


def _measured(benchmark: Benchmark | None) -> str:
    """The figures, with what they were measured with."""
    if benchmark is None:
        return "Not measured: no benchmark result came with this card."
    note = f"Prompts: {benchmark.dataset}. Measured with {benchmark.conditions}." if benchmark.conditions else ""
    return f"{benchmark.table()}\n\n{note}".strip()


def _licence(details: CardDetails) -> str:
    """The licence, or that there is none."""
    if details.license is None:
        return "Not stated; ask the author before use."
    if details.license_link is None:
        return f"`{details.license}`"
    return f"[{plain_text(details.license_name or details.license)}]({details.license_link})"
