"""One commit of a Hub repository: what it holds, and its files one by one into the cache.

Every file is measured before it is downloaded and hashed after, and a name is kept for offline use only when the
commit's files are whole. Knows no heads, no pipelines, and no tensors.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging

from lantern_hf._files import write_whole
from lantern_hf._hub_errors import HTTP_ERRORS, at_revision, hub_api, hub_error, is_transient, one_line, with_retries
from lantern_hf._version import __version__

__all__ = ["HUB_ARGUMENTS", "RemoteFile", "Repository"]

logger = logging.get_logger(__name__)

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
"""What `Repository.open` takes; the names are those of transformers."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository, as the Hub lists it.

    Attributes:
        size: Bytes; None where the server does not tell.
        sha256: Of a large file, None for a small one.
        git_sha1: Git's name of a small file's content, None if unknown.
    """

    size: int | None
    sha256: str | None = None
    git_sha1: str | None = None

    def matches(self, path: Path) -> bool:
        """Whether a downloaded file has the listed content."""
        if self.sha256 is None and self.git_sha1 is None:
            return True
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
        with path.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
        return digest.hexdigest() == (self.sha256 or self.git_sha1)


class Repository:
    """A model repository of the Hub at one commit, online or as far as the cache holds it. Made by `open`.

    Attributes:
        name: Hub id.
        commit: Commit hash.
        files: Files by name; None offline, where only the cache can tell.
    """

    def __init__(
        self,
        name: str,
        commit: str,
        files: dict[str, RemoteFile] | None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        force_download: bool = False,
    ) -> None:
        self.name, self.commit, self.files = name, commit, files
        self._revision, self._token, self._force = revision, token, force_download
        self._cache = Path(constants.HF_HUB_CACHE if cache_dir is None else cache_dir).expanduser().resolve()

    @classmethod
    def open(
        cls,
        name: str,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> Repository:
        """Find the commit of a revision and list its files; nothing is downloaded.

        Args:
            name: Hub id.
            revision: Branch, tag or commit. Default: `main`.
            token: As in huggingface_hub.
            cache_dir: Cache in place of the usual one.
            local_files_only: Do not ask the Hub; `HF_HUB_OFFLINE=1` says the same.
            force_download: Download also what the cache holds.

        Returns:
            The repository; as the cache holds it when the Hub is not asked or out of reach.

        Raises:
            FileNotFoundError: No such repository or revision, or nothing of it in the cache.
            OSError: The Hub refuses, or is out of reach and the cache does not hold it either.
            ValueError: The name is no Hub id, or a file's name climbs out of its folder.
        """
        # transformers passes on the commit that it resolved the name to, so that config and weights are of one
        revision = getattr(revision, "resolved", revision)
        _check_id(name, revision)
        rest: dict[str, Any] = {"token": token, "cache_dir": cache_dir}
        if local_files_only or constants.is_offline_mode():
            commit = _cached_commit(name, revision, cache_dir)
            if commit is None:
                raise FileNotFoundError(
                    f"{at_revision(name, revision)} is not in the cache, and the Hub is not asked (offline). "
                    "Go online once, or check the name."
                )
            return cls(name, commit, None, revision=revision, **rest)
        try:
            info = with_retries(lambda: hub_api(token).model_info(name, revision=revision, files_metadata=True))
        except HTTP_ERRORS as error:
            commit = _cached_commit(name, revision, cache_dir) if is_transient(error) else None
            if commit is None or force_download:
                raise hub_error(error, name, revision) from error
            logger.warning(f"{one_line(hub_error(error, name, revision))} The copy in the cache is used.")
            return cls(name, commit, None, revision=revision, **rest)
        files = {}
        for sibling in info.siblings or []:
            _check_name(name, sibling.rfilename)
            sha256 = None if sibling.lfs is None else sibling.lfs.sha256
            # a large file's git object is its pointer, so that hash says nothing about the content
            files[sibling.rfilename] = RemoteFile(sibling.size, sha256, None if sha256 else sibling.blob_id)
        return cls(name, str(info.sha), files, revision=revision, force_download=force_download, **rest)

    @property
    def folder(self) -> Path:
        """Where the cache keeps this commit's files."""
        return self._storage / "snapshots" / self.commit

    @property
    def _storage(self) -> Path:
        return self._cache / f"models--{self.name.replace('/', '--')}"

    def holds(self, file: str) -> bool:
        """Whether there is such a file; offline, whether the cache has it."""
        return self._cached(file) is not None if self.files is None else file in self.files

    def fetch(self, file: str, max_bytes: int) -> Path:
        """Give the path of a file, downloaded if it is not in the cache.

        Args:
            file: Name within the repository.
            max_bytes: Largest size to accept; a larger file is refused before anything is downloaded.

        Returns:
            The path in the cache.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is too large.
            OSError: The download broke off or is corrupt; the cache is then as it was.
        """
        cached = self._cached(file)
        if self.files is None:
            if cached is None:
                where = at_revision(self.name, self._revision)
                raise FileNotFoundError(
                    f"{file} of {where} is not in the cache, and the Hub is not asked or out of reach. Go online once."
                )
            _check_size(self.name, file, cached.stat().st_size, max_bytes)
            return cached
        if file not in self.files:
            raise FileNotFoundError(
                f"{at_revision(self.name, self._revision)} holds no {file}. Check the name and revision."
            )
        listed = self.files[file]
        if listed.size is not None:
            _check_size(self.name, file, listed.size, max_bytes)
        try:
            path = Path(
                hf_hub_download(
                    self.name,
                    file,
                    revision=self.commit,
                    token=self._token,
                    cache_dir=self._cache,
                    force_download=self._force,
                    library_name="lantern_hf",
                    library_version=__version__,
                )
            )
        except HTTP_ERRORS as error:
            raise hub_error(error, self.name, self._revision, file) from error
        if cached is None or self._force:
            self._check_download(file, path, listed, max_bytes)
        return path

    def keep(self) -> None:
        """Note that the revision is this commit, so that offline use finds it. Call it when all files are there.

        The client would note it with the first file of several, and a download that breaks off after it would hide the
        whole copy of an earlier commit.
        """
        revision = self._revision or constants.DEFAULT_REVISION
        if self.files is None or revision == self.commit:
            return
        note = self._storage / "refs" / revision
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            write_whole(note, lambda temporary: temporary.write_text(self.commit))
        except OSError as error:  # a read-only cache serves as well
            logger.info(f"The cache does not note the commit of {self.name}: {error}")

    def _cached(self, file: str) -> Path | None:
        """Path of a file in the cache, None if it is not there."""
        found = try_to_load_from_cache(self.name, file, cache_dir=self._cache, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def _check_download(self, file: str, path: Path, listed: RemoteFile, max_bytes: int) -> None:
        """Refuse a download that is not what the Hub lists, and take it out of the cache."""
        try:
            _check_size(self.name, file, path.stat().st_size, max_bytes)
            if listed.matches(path):
                return
            raise OSError(
                f"{file} of {self.name} arrived corrupt: its hash is not the one the Hub lists. It is out of the cache "
                "again; download it anew."
            )
        except (OSError, ValueError):
            if path.is_symlink():
                path.parent.joinpath(path.readlink()).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise


def _check_id(name: str, revision: str | None) -> None:
    """Refuse what is neither a folder nor can be a Hub id, and a revision that is a path."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(
            f"{name[:200]!r} is neither a folder nor a Hub id such as 'someone/anole-7b-lantern-head'."
        ) from error
    if revision is not None and (not revision or ".." in revision or revision.startswith("/")):
        raise ValueError(f"`revision` must be a branch, a tag or a commit, got {revision[:80]!r}.")


def _cached_commit(name: str, revision: str | None, cache_dir: str | os.PathLike[str] | None) -> str | None:
    """The commit of a revision, as far as the cache knows it."""
    try:
        cache = None if cache_dir is None else Path(cache_dir)
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)).name
    except LocalEntryNotFoundError:
        return None


def _check_name(repository: str, file: str) -> None:
    """Refuse a repository that holds a file whose name leads out of it."""
    parts = PurePosixPath(file).parts
    if not parts or file.startswith("/") or ".." in parts or any(mark in file for mark in "\\\0:\n\r"):
        raise ValueError(
            f"{repository} holds a file named {file[:80]!r}, which leads out of its folder. Do not use it."
        )


def _check_size(repository: str, file: str, size: int, max_bytes: int) -> None:
    """Refuse a file that is larger than it can have reason to be."""
    if size > max_bytes:
        raise ValueError(
            f"{file} of {repository} has {size:,} bytes, where at most {max_bytes:,} make sense. It was not loaded."
        )
