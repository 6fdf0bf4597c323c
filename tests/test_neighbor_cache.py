"""Neighbour tables on disk: found again, shared between processes, and never in the way of a generation."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prompt, tiny_chameleon, tiny_head
from helpers import BEGIN_IMAGE
from safetensors.torch import save_file

from lantern_hf import LanternConfig, NeighborTable, cached_neighbors, lantern_generate, neighbor_cache
from lantern_hf.neighbor_cache import CACHE_VARIABLE, DISABLE_VARIABLE
from lantern_hf.neighbors import codebook_hash

CODEBOOK = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
LARGE = torch.randn(2048, 2, generator=torch.Generator().manual_seed(1))  # worth keeping by default


@pytest.fixture
def no_building(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it, and from then on a table has to come from disk."""

    def forbid() -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("a table was built")

        monkeypatch.setattr(NeighborTable, "from_codebook", fail)

    return forbid


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_table_is_built_once(tmp_path: Path, no_building: Any) -> None:
    built = cached_neighbors(CODEBOOK, 7, cache_dir=tmp_path / "deep")
    assert names(tmp_path / "deep") == [f"{codebook_hash(CODEBOOK)}-l2-7.safetensors"]
    assert torch.equal(built.indices, NeighborTable.from_codebook(CODEBOOK, 7).indices)
    no_building()
    for k in (7, 3):  # one with more neighbours serves too
        found = cached_neighbors(CODEBOOK, k, cache_dir=tmp_path / "deep")
        assert (found.k, found.metric, found.indices.dtype) == (k, "l2", torch.int32)
        assert torch.equal(found.indices, built.first(k).indices)
        found.check(CODEBOOK)
    for args in ((CODEBOOK, 8), (CODEBOOK, 7, "cosine"), (-CODEBOOK, 7), (CODEBOOK.bfloat16(), 7)):
        with pytest.raises(AssertionError, match="a table was built"):
            cached_neighbors(*args, cache_dir=tmp_path / "deep")


def test_the_smallest_table_that_serves_is_read(tmp_path: Path) -> None:
    for k in (3, 20, 9):
        cached_neighbors(CODEBOOK, k, cache_dir=tmp_path)
    assert len(names(tmp_path)) == 3 - 1  # 9 of them come from the table of 20
    (tmp_path / f"{codebook_hash(CODEBOOK)}-l2-many.safetensors").touch()
    assert cached_neighbors(CODEBOOK, 2, cache_dir=tmp_path).k == 2


def spoil_bytes(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def spoil_content(file: Path) -> None:
    file.write_bytes(b"")


def other_codebook(file: Path) -> None:
    NeighborTable.from_codebook(-CODEBOOK, 7).save(file)


def other_metric(file: Path) -> None:
    NeighborTable.from_codebook(CODEBOOK, 7, "cosine").save(file)


def too_few(file: Path) -> None:
    NeighborTable.from_codebook(CODEBOOK, 2).save(file)


def flipped_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def foreign(file: Path) -> None:
    save_file({"weight": torch.zeros(2)}, file)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [spoil_bytes, spoil_content, other_codebook, other_metric, too_few, flipped_bit, foreign, a_folder],
    ids=lambda spoil: spoil.__name__,
)
def test_damaged_files_are_built_again(spoil: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = cached_neighbors(CODEBOOK, 7, cache_dir=tmp_path)
    file = tmp_path / names(tmp_path)[0]
    spoil(file)
    with caplog.at_level(logging.WARNING):
        again = cached_neighbors(CODEBOOK, 7, cache_dir=tmp_path)
    assert torch.equal(again.indices, expected.indices)
    assert "cannot be used and is built again" in caplog.text
    if spoil is not a_folder:  # which is not ours to remove
        assert torch.equal(NeighborTable.load(file).indices, expected.indices)
        assert names(tmp_path) == [file.name]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    table = cached_neighbors(CODEBOOK, 7, cache_dir=tmp_path / "file" / "below")
    assert torch.equal(table.indices, NeighborTable.from_codebook(CODEBOOK, 7).indices)
    assert "could not be kept" in caplog.text
    assert CACHE_VARIABLE in caplog.text
    assert DISABLE_VARIABLE in caplog.text


def test_a_full_disk_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lantern_hf.neighbors.os.fsync", full)
    assert cached_neighbors(CODEBOOK, 7, cache_dir=tmp_path).k == 7
    assert "No space left" in caplog.text
    assert names(tmp_path) == []


def test_where_tables_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_building: Any) -> None:
    monkeypatch.setattr(neighbor_cache, "HF_HOME", str(tmp_path / "home"))
    for variable in (CACHE_VARIABLE, DISABLE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    cached_neighbors(CODEBOOK, 7)  # built faster than read
    cached_neighbors(LARGE, 4, cache_dir=False)
    monkeypatch.setenv(DISABLE_VARIABLE, "true")
    cached_neighbors(LARGE, 4)
    assert names(tmp_path) == []
    monkeypatch.setenv(DISABLE_VARIABLE, "0")
    cached_neighbors(LARGE, 4)
    file = f"{codebook_hash(LARGE)}-l2-4.safetensors"
    assert names(tmp_path / "home" / "lantern_hf" / "neighbors") == [file]
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    cached_neighbors(LARGE, 4)
    assert names(tmp_path / "own" / "neighbors") == [file]
    no_building()
    assert cached_neighbors(LARGE, 4).k == 4


def test_unsound_arguments_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\[1, 39\] for 40 entries, got 40"):
        cached_neighbors(CODEBOOK, 40, cache_dir=tmp_path / "none")
    with pytest.raises(ValueError, match="floating-point matrix"):
        cached_neighbors(CODEBOOK[0], 4, cache_dir=tmp_path / "none")
    with pytest.raises(ValueError, match="got 'dot'"):
        cached_neighbors(CODEBOOK, 4, "dot", cache_dir=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_threads_may_build_the_same_table(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(lambda _: cached_neighbors(CODEBOOK, 7, cache_dir=tmp_path), range(24)))
    assert {table.indices.sum().item() for table in tables} == {tables[0].indices.sum().item()}
    assert len(names(tmp_path)) == 1


def test_processes_may_build_the_same_table(tmp_path: Path) -> None:
    """Both read, build, write and read again at once; every file they see is whole."""
    code = f"""
import torch
from lantern_hf import NeighborTable, cached_neighbors
codebook = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
expected = NeighborTable.from_codebook(codebook, 20)
for round in range(40):
    table = cached_neighbors(codebook, 20, cache_dir={str(tmp_path)!r})
    assert torch.equal(table.indices, expected.indices)
    if round % 4 == 0:
        table.save({str(tmp_path)!r} + "/" + sorted(__import__("os").listdir({str(tmp_path)!r}))[-1])
"""
    workers = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for worker in workers:
        _, errors = worker.communicate(timeout=240)
        assert worker.returncode == 0, errors
        assert "built again" not in errors
    assert len(names(tmp_path)) == 1


def test_generations_of_two_models_share_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_building: Any
) -> None:
    monkeypatch.setattr(neighbor_cache, "_WORTHWHILE", 2)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)

    def run() -> torch.Tensor:
        model = tiny_chameleon()
        inputs = prompt(model)
        inputs["input_ids"][:, -1] = BEGIN_IMAGE
        return model.generate(
            **inputs,
            custom_generate=lantern_generate,
            assistant=tiny_head(model),
            lantern_config=LanternConfig(neighborhood_size=5, lam=4.0),
            do_sample=True,
            max_new_tokens=8,
            generator=torch.Generator().manual_seed(0),
        )

    first = run()
    assert len(names(tmp_path / "neighbors")) == 1
    no_building()
    assert torch.equal(run(), first)
