"""Loading, saving and pushing of a draft head: what `LanternDraftModel` has on top of `PreTrainedModel`.

A head is found (in a folder, or on the Hub at one commit), its files are checked, and only then does transformers load
it. Saving and pushing write the same files.
"""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from transformers import PreTrainedModel

from lantern_hf._files import staged_files
from lantern_hf._hub_card import CardDetails
from lantern_hf._hub_download import HUB_ARGUMENTS, Repository
from lantern_hf._hub_push import push_to_hub
from lantern_hf._hub_training import TRAINING_FILE
from lantern_hf._hub_upload import Push
from lantern_hf._version import __version__
from lantern_hf.draft_config import LanternDraftConfig
from lantern_hf.head_files import (
    CONFIG_FILE,
    INDEX_FILE,
    MAX_CONFIG_BYTES,
    NEIGHBORS_FILE,
    WEIGHTS_FILE,
    check_finite,
    check_weights,
    max_weight_bytes,
    read_config,
    shard_names,
    weight_files,
)
from lantern_hf.head_publishing import push_head
from lantern_hf.neighbors import MAX_TABLE_BYTES, NeighborTable

__all__ = ["DraftFilesMixin", "check_head", "fetch_head", "find_head"]


class DraftFilesMixin(PreTrainedModel):
    """Loading that refuses what does not fit, and saving and pushing that take the neighbour table along."""

    config: LanternDraftConfig
    neighbors: NeighborTable | None
    _push_message = "Upload draft head"
    push_to_hub = push_to_hub  # type: ignore[assignment]  # with a card, which the library's own lacks

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a head and its table as `PreTrainedModel.from_pretrained` does, but refuse what does not fit.

        Only `config.json`, `model.safetensors` (or its shards) and `neighbors.safetensors` are downloaded and read, all
        of one commit. Sizes, names, shapes and dtypes are checked before anything is allocated; no pickle is ever read.

        Args:
            *args: Folder or Hub id.
            output_loading_info: Return `(head, info)`.
            **kwargs: As in transformers; fields of `LanternDraftConfig` replace those of the file.

        Returns:
            The head, not bound to a target.

        Raises:
            FileNotFoundError: There is no such head, or it is incomplete.
            OSError: The Hub cannot be reached, or a download is corrupt.
            ValueError: The files are no head: a config out of range, weights that are missing, unknown, of another
                shape or dtype or not finite, or a neighbour table of another codebook.
        """
        load: Any = super().from_pretrained
        name = args[0] if args else kwargs.pop("pretrained_model_name_or_path", None)
        if name is None:  # weights come as `state_dict`
            return load(None, *args[1:], output_loading_info=output_loading_info, **kwargs)
        for argument in ("use_safetensors", "variant", "gguf_file", "from_tf", "from_flax"):
            if kwargs.pop(argument, None) not in (None, argument == "use_safetensors"):
                raise ValueError(f"`{argument}` is not for a draft head, which is read from {WEIGHTS_FILE} alone.")
        where = {key: kwargs.pop(key) for key in (*HUB_ARGUMENTS, "subfolder") if key in kwargs}
        kwargs.pop("proxies", None)
        folder, commit = find_head(cls, name, **where)
        config = _config_of(folder, kwargs)
        check_head(cls, folder, config)
        head, info = load(folder, *args[1:], config=config, output_loading_info=True, local_files_only=True, **kwargs)
        check_finite(name, dict(head.named_parameters()))
        head.config._name_or_path = head.name_or_path = os.fspath(name)  # not the cache's own path
        head.config._commit_hash = commit
        head.neighbors = _table_of(folder, config)
        return (head, info) if output_loading_info else head

    def save_pretrained(  # type: ignore[override]  # the rest of its arguments are in **kwargs
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save as `PreTrainedModel.save_pretrained` does, and the neighbour table beside the weights.

        Files are written beside and renamed when they are whole, so that a kill leaves each old or new, never broken.

        Args:
            save_directory: Folder to write.
            is_main_process: Whether this process writes.
            push_to_hub: Push the head afterwards, to `repo_id` or a repository named like the folder.
            **kwargs: As in transformers.

        Raises:
            ValueError: The neighbour table is of another codebook.
        """
        self._check_neighbors()
        names = ("repo_id", "commit_message", "commit_description", "private", "create_pr", "revision")
        upload = {name: kwargs.pop(name) for name in names if name in kwargs}
        self.config.lantern_version = __version__
        if kwargs.pop("variant", None) is not None:
            raise ValueError(f"`variant` is not for a draft head, which is read from {WEIGHTS_FILE} alone.")
        folder = Path(save_directory)
        if folder.is_file():
            raise ValueError(f"`save_directory` must be a folder, {str(folder)!r} is a file.")
        if is_main_process:
            self._write(folder, **kwargs)
        else:
            super().save_pretrained(folder, is_main_process, **kwargs)
        if push_to_hub and is_main_process:
            self.push_to_hub(upload.pop("repo_id", folder.name), token=kwargs.get("token"), **upload)

    def _write(self, folder: Path, **kwargs: Any) -> None:
        """Write every file beside its place, then rename all; stale shards and a stale table go."""
        # the config last: a folder without one is no head, and a first save that is cut short leaves none
        with staged_files(folder, CONFIG_FILE) as staging:
            super().save_pretrained(staging, True, **kwargs)
            if self.neighbors is not None:
                self.neighbors.save(staging / NEIGHBORS_FILE)
            names = {file.name for file in staging.iterdir()}
        for file in [*folder.glob("model*.safetensors"), folder / INDEX_FILE, folder / NEIGHBORS_FILE]:
            if file.name not in names:  # an earlier save left it, of another head or in shards
                file.unlink(missing_ok=True)

    def _push(self, folder: Path, push: Push, card: CardDetails) -> CommitInfo:
        """Send the head that was saved in a folder, with the record of its training if it came from beside one."""
        record = Path(self.name_or_path or "", TRAINING_FILE)
        if self.name_or_path and card.training is None and record.is_file():
            shutil.copyfile(record, folder / TRAINING_FILE)
        return push_head(folder, push, card)

    def _check_neighbors(self) -> None:
        """Refuse a neighbour table of another codebook."""
        table, size = self.neighbors, self.config.codebook_size
        if table is not None and size is not None and table.num_codes != size:
            raise ValueError(
                f"`neighbors` covers {table.num_codes} codes, but this head drafts from a codebook of {size}. "
                "Build a table from the target's codebook: NeighborTable.from_codebook(codebook, k)."
            )


def find_head(
    cls: Any, name: str | os.PathLike[str], *, subfolder: str | None = None, **where: Any
) -> tuple[Path, str | None]:
    """Find the folder of a head, downloaded if it is a Hub id.

    Args:
        cls: The head's class, which knows what a config implies.
        name: Folder or Hub id.
        subfolder: Folder of the head within.
        **where: As `Repository.open`.

    Returns:
        The folder, and the commit if it came from the Hub.
    """
    if os.path.isdir(name):
        return Path(name, subfolder or ""), None
    if Path(name).is_file():
        raise ValueError(f"{os.fspath(name)!r} is a file; name the folder of a draft head, or its Hub id.")
    repository = Repository.open(os.fspath(name), **where)
    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    return fetch_head(cls, repository, prefix), repository.commit


def fetch_head(cls: Any, repository: Repository, prefix: str = "") -> Path:
    """Download a head's files, each no larger than the config implies, and nothing else.

    Args:
        cls: The head's class.
        repository: Where it is.
        prefix: Folder within, empty or ending in a slash.

    Returns:
        The folder in the cache.
    """
    config = read_config(repository.fetch(prefix + CONFIG_FILE, MAX_CONFIG_BYTES))
    limit = max_weight_bytes(config, _shapes(cls, config))
    if repository.holds(prefix + WEIGHTS_FILE):
        repository.fetch(prefix + WEIGHTS_FILE, limit)
    elif repository.holds(prefix + INDEX_FILE):
        for shard in shard_names(repository.fetch(prefix + INDEX_FILE, MAX_CONFIG_BYTES)):
            repository.fetch(prefix + shard, limit)
    elif foreign := [file for file in repository.files or () if file.startswith(prefix + "pytorch_model")]:
        raise ValueError(
            f"{repository.name} holds its weights as {foreign[0]}, which can run code when it is read. A head is read "
            f"from {WEIGHTS_FILE} alone; turn it into one with `lantern-hf convert`."
        )
    else:
        repository.fetch(prefix + WEIGHTS_FILE, limit)  # says that it is missing
    if repository.holds(prefix + NEIGHBORS_FILE):
        repository.fetch(prefix + NEIGHBORS_FILE, MAX_TABLE_BYTES)
    repository.keep()
    return repository.folder / prefix


def check_head(cls: Any, folder: Path, config: LanternDraftConfig | None = None) -> list[Path]:
    """Check the files of a head in a folder; weights are not read, only what their headers say.

    Args:
        cls: The head's class.
        folder: Where they are.
        config: Config in place of the file's.

    Returns:
        The files.

    Raises:
        FileNotFoundError: One is missing.
        ValueError: They are no sound head.
    """
    if (folder / "adapter_config.json").exists():  # transformers would load another model in the head's place
        raise ValueError(f"{folder} holds an adapter_config.json, so it is no draft head but an adapter of a model.")
    files = weight_files(folder)
    config = config or read_config(folder / CONFIG_FILE)
    shapes = _shapes(cls, config)
    check_weights(files, shapes, max_weight_bytes(config, shapes))
    _table_of(folder, config)
    others = [folder / name for name in (CONFIG_FILE, INDEX_FILE, NEIGHBORS_FILE)]
    return [*files, *(file for file in others if file.is_file())]


def _table_of(folder: Path, config: LanternDraftConfig) -> NeighborTable | None:
    """The neighbour table of a head in a folder, None if it has none."""
    table = folder / NEIGHBORS_FILE
    return NeighborTable.load(table, num_codes=config.codebook_size) if table.is_file() else None


def _config_of(folder: Path, kwargs: dict[str, Any]) -> LanternDraftConfig:
    """The config a head is loaded with: the caller's, or the file's with fields the caller replaces."""
    given = kwargs.pop("config", None)
    if given is not None and not isinstance(given, LanternDraftConfig):
        given = read_config(Path(given, CONFIG_FILE) if os.path.isdir(given) else Path(given))
    config = given or read_config(folder / CONFIG_FILE)
    known = config.to_dict().keys() - {"dtype", "torch_dtype"}
    changed = {key: kwargs.pop(key) for key in sorted(kwargs.keys() & known)}
    if not changed:
        return config
    replaced: LanternDraftConfig = LanternDraftConfig.from_dict(config.to_dict() | changed)
    replaced._attn_implementation = config._attn_implementation
    return replaced


def _shapes(cls: Any, config: LanternDraftConfig) -> dict[str, torch.Size]:
    """Shape of every parameter that a config implies; nothing is allocated."""
    with torch.device("meta"):
        return {name: value.shape for name, value in cls(copy.deepcopy(config)).state_dict().items()}
