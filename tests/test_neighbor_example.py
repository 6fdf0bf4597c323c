"""`examples/neighbor_tables.py` does what its first lines say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from diffusers import VQModel

from lantern_hf import NeighborTable

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "neighbor_tables", raising=False)
    import neighbor_tables

    return neighbor_tables


def test_a_random_codebook(script, tmp_path: Path) -> None:
    out = tmp_path / "table.safetensors"
    given = ["--codes", "60", "--width", "4", "--k", "9", "--metric", "cosine", "--out", str(out)]
    taken = script.run(script.parser().parse_args(given))
    assert (taken["codebook"], taken["k"]) == ("(60, 4) cosine", 9)
    assert taken["peak_mib"] >= taken["of_which_before_mib"] > 0
    table = NeighborTable.load(out)
    assert (table.num_codes, table.k, table.metric) == (60, 9, "cosine")


def test_the_codebook_of_a_vq_model(script, tmp_path: Path) -> None:
    vq = VQModel(block_out_channels=(32,), norm_num_groups=8, num_vq_embeddings=20, vq_embed_dim=3)
    vq.save_pretrained(tmp_path / "vq")
    out = tmp_path / "table.safetensors"
    script.run(script.parser().parse_args(["--vq", str(tmp_path / "vq"), "--k", "5", "--out", str(out)]))
    NeighborTable.load(out).check(vq.quantize.embedding.weight)
