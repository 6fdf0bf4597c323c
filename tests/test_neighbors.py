"""Neighbour tables: exactness, ties, files that survive, and tables that refuse the wrong codebook."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lantern_hf import _nearest, neighbors
from lantern_hf.neighbors import NeighborTable, codebook_hash

VECTORS = load_file(Path(__file__).parent / "golden" / "acceptance.safetensors")
CODEBOOK = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))


def brute_force(points: torch.Tensor, k: int) -> list[list[int]]:
    """Sort by (distance, index) entry by entry."""
    rows = []
    for x, point in enumerate(points.double()):
        distance = (points.double() - point).square().sum(1).tolist()
        rows.append(sorted((y for y in range(len(points)) if y != x), key=lambda y: (distance[y], y))[:k])
    return rows


def test_equals_the_published_table() -> None:
    table = NeighborTable.from_codebook(VECTORS["codebook"], 47)
    assert table.indices.tolist() == VECTORS["nearest"].tolist()


@pytest.mark.parametrize("metric", neighbors.METRICS)
@pytest.mark.parametrize("k", [1, 7, 49])
def test_equals_brute_force(metric: str, k: int) -> None:
    points = CODEBOOK if metric == "l2" else torch.nn.functional.normalize(CODEBOOK.double())
    assert NeighborTable.from_codebook(CODEBOOK, k, metric).indices.tolist() == brute_force(points, k)


def test_ties_come_in_the_order_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))
    codebook = torch.cat([grid, grid])  # many equal distances, and every entry twice
    expected = brute_force(codebook, 31)
    assert NeighborTable.from_codebook(codebook, 31).indices.tolist() == expected
    monkeypatch.setattr(_nearest, "_ELEMENTS", 3 * len(codebook))
    assert NeighborTable.from_codebook(codebook, 31).indices.tolist() == expected


@pytest.mark.parametrize("spare", [1, 5, 200])
@pytest.mark.parametrize("k", [1, 13, 100])
def test_doubtful_cases_are_settled(monkeypatch: pytest.MonkeyPatch, k: int, spare: int) -> None:
    """The product form of a distance is worthless far from the origin, and cannot tell equal distances apart."""
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(_nearest, "_SPARE", spare)
    far = 1e4 + 1e-4 * torch.randn(101, 5, generator=generator, dtype=torch.float64)
    unused = torch.cat([torch.zeros(60, 5), torch.randn(41, 5, generator=generator)])
    coarse = torch.randint(-2, 3, (101, 3), generator=generator).float()
    for codebook in (far, unused, coarse, torch.randn(101, 5, generator=generator).bfloat16()):
        assert NeighborTable.from_codebook(codebook, k).indices.tolist() == brute_force(codebook, k)


def test_cosine_is_l2_between_normalised_entries() -> None:
    """As LlamaGen, Janus and GLM-Image measure distance; the table is bound to the entries as they are stored."""
    table = NeighborTable.from_codebook(CODEBOOK, 20, "cosine")
    normalised = torch.nn.functional.normalize(CODEBOOK.double())
    assert torch.equal(table.indices, NeighborTable.from_codebook(normalised, 20).indices)
    table.check(CODEBOOK)
    assert not torch.equal(table.indices, NeighborTable.from_codebook(CODEBOOK, 20).indices)


def test_cosine_allows_an_unused_entry_of_zeros() -> None:
    codebook = torch.cat([torch.zeros(1, 6), CODEBOOK])
    assert NeighborTable.from_codebook(codebook, 3, "cosine").indices.shape == (51, 3)


def test_first_is_a_view_and_to_keeps_the_table() -> None:
    table = NeighborTable.from_codebook(CODEBOOK, 9)
    assert (table.k, table.num_codes, table.indices.dtype) == (9, 50, torch.int32)
    first = table.first(2)
    assert first.indices.data_ptr() == table.indices.data_ptr()
    assert torch.equal(first.indices, NeighborTable.from_codebook(CODEBOOK, 2).indices)
    first.check(CODEBOOK)
    assert table.to("cpu") is table
    assert table.to("meta").device.type == "meta"
    assert "50 codes, k=2" in repr(first)
    with pytest.raises(ValueError, match=r"in \[1, 9\].*got 10"):
        table.first(10)


@pytest.mark.parametrize("limit", [2**16, 10])
def test_save_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    table = NeighborTable.from_codebook(CODEBOOK, 5, "cosine")
    if limit == 10:  # as for a codebook too large for uint16
        table = NeighborTable(table.indices, metric=table.metric, hashes=table.hashes)
    path = table.save(tmp_path / "deep" / "neighbors.safetensors")
    assert [p.name for p in path.parent.iterdir()] == ["neighbors.safetensors"]
    loaded = NeighborTable.load(path)
    assert torch.equal(loaded.indices, table.indices)
    assert (loaded.metric, loaded.hashes, loaded.indices.dtype) == ("cosine", table.hashes, torch.int32)
    loaded.check(CODEBOOK)
    assert path.stat().st_size < 2000


def test_large_codebooks_are_stored_as_int32(tmp_path: Path) -> None:
    indices = (torch.arange(2**16 + 1) + 1).remainder(2**16 + 1)[:, None]
    path = NeighborTable(indices).save(tmp_path / "table.safetensors")
    assert load_file(path)["indices"].dtype == torch.int32
    assert torch.equal(NeighborTable.load(path).indices.long(), indices)


def test_check_knows_the_codebook() -> None:
    table = NeighborTable.from_codebook(CODEBOOK, 3)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        table.check(CODEBOOK.to(dtype))
        table.check(CODEBOOK.to(dtype).float())
    with pytest.raises(
        ValueError, match=f"another codebook.*{codebook_hash(CODEBOOK)[:12]}.*{codebook_hash(-CODEBOOK)[:12]}"
    ):
        table.check(-CODEBOOK)
    with pytest.raises(ValueError, match=r"covers 50 codes, the codebook has shape \(49, 6\)"):
        table.check(CODEBOOK[:49])
    NeighborTable(table.indices).check(-CODEBOOK)  # no hash was recorded, so only the size is known


def test_codebook_hash_follows_values_and_shape() -> None:
    assert len(codebook_hash(CODEBOOK)) == 64
    assert codebook_hash(CODEBOOK) == codebook_hash(CODEBOOK.double().t().contiguous().t())
    assert codebook_hash(CODEBOOK) != codebook_hash(CODEBOOK.reshape(25, 12))
    assert codebook_hash(torch.zeros(2, 2)) == codebook_hash(-torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.tensor([1, 0]), r"shape \(K, k\).*got \(2,\)"),
        (torch.tensor([[1, 0], [0, 1]]), r"k < K, got \(2, 2\)"),
        (torch.tensor([[1.0], [0.0]]), "int32 or int64, got torch.float32"),
        (torch.tensor([[2], [0]]), r"in \[0, 2\) for 2 codes, got 0 to 2"),
        (torch.tensor([[-1], [0]]), "got -1 to 0"),
        (torch.tensor([[1], [1]]), "Code 1 is in its own row"),
    ],
)
def test_unsound_indices_are_refused(indices: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeighborTable(indices)


@pytest.mark.parametrize(
    ("codebook", "k", "metric", "message"),
    [
        (CODEBOOK[0], 3, "l2", r"matrix of at least 2 entries \(K, C\), got torch.float32 of shape \(6,\)"),
        (CODEBOOK.long(), 3, "l2", "floating-point matrix"),
        (CODEBOOK.masked_fill(torch.arange(6) == 1, float("nan")), 3, "l2", "50 of 50 entries that are not finite"),
        (CODEBOOK, 50, "l2", r"in \[1, 49\] for 50 entries, got 50"),
        (CODEBOOK, 0, "l2", "got 0"),
        (CODEBOOK, 3, "dot", "'l2', 'cosine', got 'dot'"),
    ],
)
def test_unsound_arguments_are_refused(codebook, k: int, metric: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeighborTable.from_codebook(codebook, k, metric)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    table = NeighborTable.from_codebook(CODEBOOK, 3)
    path = table.save(tmp_path / "table.safetensors")
    metadata = {"format": "lantern_hf.neighbors/1", "k": "4", "num_codes": "50"}
    save_file({"indices": table.indices}, path, metadata)
    with pytest.raises(ValueError, match="50 x 3 indices but says 50 x 4"):
        NeighborTable.load(path)
    save_file({"indices": table.indices + 48}, path, metadata)
    with pytest.raises(ValueError, match=r"must be in \[0, 50\)"):
        NeighborTable.load(path)
    for tensors in ({"indices": table.indices.long()}, {"other": table.indices}):
        save_file(tensors, path, metadata)
        with pytest.raises(ValueError, match="is not a neighbor table"):
            NeighborTable.load(path)
    table.save(path)
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1, 0]))  # still a code, but another one
    with pytest.raises(ValueError, match=r"(indices are not those that were written|own row)"):
        NeighborTable.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a safetensors file"):
        NeighborTable.load(path)
    with pytest.raises(FileNotFoundError):
        NeighborTable.load(tmp_path / "absent.safetensors")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = NeighborTable.from_codebook(CODEBOOK, 3).save(tmp_path / "table.safetensors")
    before = path.read_bytes()

    def fail(*_) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(neighbors.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        NeighborTable.from_codebook(CODEBOOK, 5).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["table.safetensors"]
