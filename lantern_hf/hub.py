"""The Hub from above: push a folder, pull a head, write a card, and run what `custom_generate=` asks for.

Loading and pushing of one head or pipeline are methods of theirs; here is what takes a name or a folder and finds out
what it is.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers import PreTrainedModel

from lantern_hf._files import sync, write_file
from lantern_hf._hub_card import CardDetails, check_card, merge_card
from lantern_hf._hub_download import HUB_ARGUMENTS, Repository
from lantern_hf._hub_results import read_json
from lantern_hf._hub_upload import Push
from lantern_hf.attach import run_generate
from lantern_hf.draft import LanternDraftModel
from lantern_hf.draft_files import check_head, fetch_head
from lantern_hf.head_publishing import head_card, published_config, push_head
from lantern_hf.resolve import head_for
from lantern_hf.strategy import lantern_generate

__all__ = ["CardDetails", "download_pipeline", "generate_with_head", "pull_head", "push_folder", "write_card"]

# What a pipeline's folder holds; weights are safetensors, and nothing else there is code or can run any.
_PIPELINE_FILES = (".json", ".txt", ".model", ".jinja", ".safetensors")
_MAX_TEXT, _MAX_WEIGHTS = 2**27, 2**36
_LIBRARIES = ("transformers", "diffusers", "lantern_hf")


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    card: CardDetails | None = None,
    message: str = "Upload draft head",
    **where: Any,
) -> CommitInfo:
    """Publish a head that was saved in a folder; see `LanternDraftModel.push_to_hub`.

    Args:
        folder: What `save_pretrained` wrote; it is only read.
        repo_id: Hub id.
        card: Licence, training, benchmark, picture.
        message: First line of the commit.
        **where: `description`, `revision`, `private`, `token`, `create_pr`.

    Returns:
        The commit.

    Raises:
        PermissionError: No token, or one without the right.
        ValueError: The folder holds no sound head, or the card is not valid.
        OSError: The Hub refuses or cannot be reached; the repository is then as it was.
    """
    if Path(folder, "model_index.json").is_file():
        raise ValueError(
            f"{os.fspath(folder)!r} is a pipeline. Push it with "
            f"LanternPipeline.from_pretrained({os.fspath(folder)!r}).push_to_hub({repo_id!r})."
        )
    check_head(LanternDraftModel, Path(folder))
    return push_head(Path(folder), Push(repo_id, message, **where), card or CardDetails())


def pull_head(name: str, to: str | os.PathLike[str] | None = None, **where: Any) -> Path:
    """Download a head, checked, into the cache or a folder of its own.

    Args:
        name: Hub id.
        to: Folder to make; it appears when all files are in it. Default: the cache's own folder.
        **where: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.

    Returns:
        The folder, with config, weights, neighbour table if there is one, and card.

    Raises:
        FileExistsError: `to` exists and holds something.
        FileNotFoundError: There is no such head.
        OSError: The Hub cannot be reached, or a download is corrupt.
        ValueError: The files are no sound head.
    """
    target = None if to is None else Path(to)
    if target is not None and (target.is_file() or (target.is_dir() and any(target.iterdir()))):
        raise FileExistsError(f"{target} exists and is not empty. Name a folder that is to be made.")
    if unknown := sorted(where.keys() - set(HUB_ARGUMENTS)):
        raise TypeError(f"{unknown} are no arguments of `pull_head`. Allowed: {list(HUB_ARGUMENTS)}.")
    repository = Repository.open(name, **where)
    folder = fetch_head(LanternDraftModel, repository)
    extras = [file for file in ("README.md", "LICENSE") if repository.holds(file)]
    for file in extras:
        repository.fetch(file, _MAX_TEXT)
    files = check_head(LanternDraftModel, folder)
    if target is None:
        return folder
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as staging:
        whole = Path(staging, "head")
        whole.mkdir()
        for source in [*files, *(folder / extra for extra in extras)]:
            shutil.copyfile(source, whole / source.name)
            sync(whole / source.name)
        os.replace(whole, target)
    return target


def write_card(folder: str | os.PathLike[str], repo_id: str, card: CardDetails | None = None) -> Path:
    """Write the card of a head into its folder; what a person wrote into an earlier one stays.

    Args:
        folder: The head's folder.
        repo_id: Hub id the card is for.
        card: Licence, training, benchmark, picture, which is copied into the folder.

    Returns:
        The card's path.

    Raises:
        FileNotFoundError: There is no head.
        ValueError: The folder holds no sound head, or the card is not valid or cannot be merged with.
    """
    folder, details = Path(folder), card or CardDetails()
    check_head(LanternDraftModel, folder)
    path = folder / "README.md"
    try:
        existing = path.read_text(encoding="utf-8-sig") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text. Write it anew, or remove it.") from error
    text = merge_card(existing, *head_card(repo_id, published_config(folder, details), folder, details))
    check_card(text)
    if details.image is not None and details.image_name is not None:
        write_file(folder / details.image_name, Path(details.image).read_bytes())
    write_file(path, text.encode())
    return path


def generate_with_head(
    model: PreTrainedModel,
    *args: Any,
    assistant: Any,
    streamer: Any = None,
    revision: str | None = None,
    **kwargs: Any,
) -> Any:
    """Run `model.generate` with a head; what `custom_generate/generate.py` of a published head calls.

    Args:
        model: The target, attached or not.
        *args: As `model.generate`.
        assistant: The head, its folder or Hub id; one given by name is loaded once for each model.
        streamer: As in transformers.
        revision: Branch, tag or commit of the head.
        **kwargs: As `model.generate` and `lantern_generate`; `token`, `cache_dir`, `local_files_only` and
            `force_download` are for the head.

    Returns:
        As `model.generate`.
    """
    where = {key: kwargs.pop(key) for key in HUB_ARGUMENTS if key in kwargs} | {"revision": revision}
    if isinstance(assistant, str | Path):
        assistant = head_for(assistant, model, **{key: value for key, value in where.items() if value is not None})
    loop = {"custom_generate": lantern_generate, "assistant": assistant, "lantern_streamer": streamer}
    return run_generate(model, args, kwargs | loop)


def download_pipeline(name: str, parts: Iterable[str], index: str, **kwargs: Any) -> str:
    """Download a pipeline into the cache: what its index lists, as far as it is safetensors or text.

    Args:
        name: Hub id.
        parts: Components to download.
        index: File that lists the components.
        **kwargs: `cache_dir`, `revision`, `token`, `local_files_only`, `force_download`; others are not read.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: There is no such repository or revision, or it holds no pipeline.
        OSError: The Hub cannot be reached, or a download is corrupt.
        ValueError: The index asks for classes of another library, or a file is larger than makes sense.
    """
    repository = Repository.open(name, **{key: kwargs[key] for key in HUB_ARGUMENTS if kwargs.get(key) is not None})
    if not repository.holds(index):
        raise FileNotFoundError(f"{name} holds no {index}, so it is no pipeline. Check the Hub id.")
    listed = _components(repository.fetch(index, _MAX_TEXT))
    wanted = sorted(set(parts) & listed)
    for part in wanted:
        if part == "draft_head":
            fetch_head(LanternDraftModel, repository, f"{part}/")
    for file in sorted(repository.files or ()):
        folder, _, rest = file.partition("/")
        if folder in wanted and folder != "draft_head" and "/" not in rest and rest.endswith(_PIPELINE_FILES):
            repository.fetch(file, _MAX_WEIGHTS if rest.endswith(".safetensors") else _MAX_TEXT)
    repository.keep()
    return str(repository.folder)


def _components(index: Path) -> set[str]:
    """Names of a pipeline's components, each of a class that may be loaded."""
    names = set()
    for name, value in read_json(index, _MAX_TEXT).items():
        if name.startswith("_") or not isinstance(value, list) or value == [None, None]:
            continue
        library = value[0] if len(value) == 2 and all(isinstance(part, str) for part in value) else ""
        if library.split(".")[0] not in _LIBRARIES:
            raise ValueError(
                f"{index} asks for {json.dumps(value)[:80]} as {name[:80]!r}; components may be of "
                f"{', '.join(_LIBRARIES)} only. Do not use this pipeline."
            )
        names.add(name)
    return names
