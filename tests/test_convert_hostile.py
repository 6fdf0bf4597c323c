"""Checkpoints that are damaged, dangerous or of another model: refused in one line, cheaply, leaving nothing."""

from __future__ import annotations

import json
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import folder, foundation, golden, golden_config, training_file
from safetensors.torch import save_file
from torch import Tensor

from lantern_hf.convert import convert

GIGABYTE = 2**30
TINY = {"grid": 4, "num_attention_heads": 4}


class Bomb:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch /tmp/lantern_hf_was_run",)


class Greedy:
    """Asks for a terabyte when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (10**12,)


def archive(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED, more: tuple[str, ...] = ()) -> Path:
    """A zip archive as torch.save writes it, around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in {"archive/data.pkl": data, "archive/version": b"3\n"}.items():
            file.writestr(name, content)
        for name in more:
            file.writestr(name, b"")
    return path


def truncated(path: Path, part: float) -> Path:
    """The first part of a file."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    return path


def lying_archive(path: Path) -> Path:
    """An archive whose directory claims that its first entry is 1 TB long."""
    training_file(path, golden("llamagen_drafter"))
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\x01\x02")  # the directory; sizes are at 20 and 24
    data[place + 20 : place + 28] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)
    path.write_bytes(bytes(data))
    return path


def legacy(path: Path) -> Path:
    """A file in the format of before torch 1.6."""
    torch.save(golden("llamagen_drafter"), path, _use_new_zipfile_serialization=False)
    return path


def text(path: Path, content: bytes) -> Path:
    """A file of some bytes."""
    path.write_bytes(content)
    return path


def saved(path: Path, content: Any) -> Path:
    """What torch.save makes of something."""
    torch.save(content, path)
    return path


def huge_header(path: Path) -> Path:
    """A safetensors file whose header claims 2**60 bytes."""
    return text(path, struct.pack("<Q", 2**60) + b"{}")


def huge_tensor(path: Path) -> Path:
    """A safetensors file with a tensor of a petabyte."""
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [10**9, 10**6], "data_offsets": [0, 4 * 10**15]}})
    return text(path, struct.pack("<Q", len(header)) + header.encode())


def pickle_of_a_good_file(path: Path) -> bytes:
    """The pickle of a file, without the tensors it refers to."""
    file = training_file(path / "b.pt", golden("llamagen_drafter"))
    with zipfile.ZipFile(file) as good:
        return good.read("b/data.pkl")


Case = tuple[Callable[[Path], Path], str]
FILES: dict[str, Case] = {
    "runs a command": (lambda p: saved(p / "a.bin", {"x": Bomb()}), r"holds `posix\.system`, which is more than"),
    "asks for memory": (lambda p: saved(p / "a.bin", {"x": Greedy()}), r"holds `__builtin__\.bytearray`"),
    "protocol 4": (
        lambda p: archive(p / "a.pt", pickle.dumps({"x": Bomb()}, protocol=4)),
        r"holds the pickle instruction (FRAME|STACK_GLOBAL|SHORT_BINUNICODE)",
    ),
    "half a pickle": (lambda p: archive(p / "a.pt", pickle.dumps({"x": [1] * 9}, protocol=2)[:-4]), "is damaged: "),
    "TorchScript": (
        lambda p: archive(p / "a.pt", pickle.dumps({}, protocol=2), more=("archive/constants.pkl",)),
        "is a TorchScript program",
    ),
    "some other zip": (lambda p: archive(p / "a.pt", b"", more=("archive/sub/data.pkl",)), "not one of torch.save"),
    "zip bomb": (
        lambda p: archive(p / "a.pt", pickle.dumps({"x": "0" * 10**6}, protocol=2), zipfile.ZIP_DEFLATED),
        "is a compressed archive",
    ),
    "lying sizes": (lambda p: lying_archive(p / "a.pt"), "is damaged|entries claim 4"),
    "cut off": (
        lambda p: truncated(training_file(p / "a.pt", golden("llamagen_drafter")), 0.5),
        "no file of torch.save: its end is missing",
    ),
    "no data": (
        lambda p: archive(p / "a.pt", pickle_of_a_good_file(p)),
        "cannot be read by torch",
    ),
    "before torch 1.6": (lambda p: legacy(p / "a.bin"), r"a pickle of before torch 1\.6"),
    "LFS pointer": (lambda p: text(p / "a.bin", b"version https://git-lfs.github.com/spec/v1\n"), "a Git LFS pointer"),
    "a web page": (lambda p: text(p / "a.ckpt", b"<!doctype html>"), "it starts with b'<!doctype html>'"),
    "nothing": (lambda p: text(p / "a.pth", b""), "it is empty"),
    "stride 0": (
        lambda p: saved(p / "a.pt", {"fc.weight": torch.zeros(1).expand(10**6, 10**6)}),
        r"`fc\.weight` claims shape \(1000000, 1000000\)",
    ),
    "a list": (lambda p: saved(p / "a.pt", [torch.zeros(2)]), "holds a list, expected a dict of tensors"),
    "no tensor": (lambda p: saved(p / "a.pt", {"lr": 1e-4}), r"holds no tensors, only \['lr'\]"),
    "huge header": (lambda p: huge_header(p / "a.safetensors"), "no safetensors file, or damaged"),
    "huge tensor": (lambda p: huge_tensor(p / "a.safetensors"), "no safetensors file, or damaged"),
    "web page as safetensors": (lambda p: text(p / "a.safetensors", b"<!doctype html>"), "no safetensors file"),
    "other suffix": (lambda p: text(p / "a.h5", b""), "is no weight file"),
    "T5": (lambda p: saved(p / "a.bin", {"shared.weight": torch.zeros(2, 2)}), "This is a T5 model"),
    "EAGLE-3": (lambda p: saved(p / "a.bin", {"midlayer.fc.weight": torch.zeros(2, 6)}), "This is an EAGLE-3 head"),
    "Llama": (lambda p: saved(p / "a.bin", {"model.embed_tokens.weight": torch.zeros(2, 2)}), "transformers loads it"),
    "unknown": (lambda p: saved(p / "a.bin", {"x": torch.zeros(2)}), "found 1 tensors such as `x`; expected one of"),
}


def refused(source: Path, tmp_path: Path, message: str, **options: Any) -> None:
    """The conversion is refused in one line, without much memory, and leaves nothing."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ValueError, OSError), match=message) as error:
        convert(source, tmp_path / "out", **options)
    assert "\n" not in str(error.value)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < GIGABYTE
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file(case: str, tmp_path: Path) -> None:
    make, message = FILES[case]
    refused(make(tmp_path), tmp_path, message)
    assert not Path("/tmp/lantern_hf_was_run").exists()


INDICES: dict[str, tuple[Any, str]] = {
    "climbs out": ({"weight_map": {"fc.weight": "../evil.bin"}}, r"names '../evil\.bin', which is no weight file"),
    "absolute": ({"weight_map": {"fc.weight": "/etc/passwd.bin"}}, "which is no weight file beside it"),
    "missing file": ({"weight_map": {"fc.weight": "model-2.safetensors"}}, r"'model-2\.safetensors' of .* is missing"),
    "missing tensor": ({"weight_map": {"fc.bias2": "a.safetensors"}}, r"'fc\.bias2' of the index is in none"),
    "twice": ({"weight_map": {"fc.weight": "a.safetensors", "x": "b.safetensors"}}, r"`fc\.weight` is there twice"),
    "no map": ({"metadata": {}}, "has no `weight_map`"),
    "a list": ([1], "holds a list, expected an object"),
}


@pytest.mark.parametrize("case", INDICES)
def test_a_bad_index(case: str, tmp_path: Path) -> None:
    content, message = INDICES[case]
    source = tmp_path / "in"
    source.mkdir()
    for name in ("a", "b"):
        save_file({"fc.weight": torch.zeros(2, 4)}, source / f"{name}.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(content))
    refused(source, tmp_path, message)


def without(weights: dict[str, Tensor], pattern: str) -> dict[str, Tensor]:
    return {key: value for key, value in weights.items() if pattern not in key}


WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any], str]] = {
    "a layer is missing": (lambda w: without(w, "layers.1."), {}, "layers `model.layers.N` are 2 of 3; expected all"),
    "absurd layer": (lambda w: w | {"model.layers.99999.x": torch.zeros(1)}, {}, "are 4 of 100000"),
    "a tensor is missing": (lambda w: without(w, "2.mlp.up"), {}, r"missing `model\.layers\.2\.mlp\.up_proj"),
    "a tensor is unknown": (lambda w: w | {"model.extra": torch.zeros(2)}, {}, r"unknown `model\.extra`"),
    "a wrong shape": (
        lambda w: w | {"model.norm.weight": torch.zeros(63)},
        {},
        r"`model\.norm\.weight` of shape \(63,\) where \(64,\) is expected",
    ),
    "integers": (lambda w: w | {"lm_head.weight": torch.zeros(128, 64).long()}, {}, r"of dtype torch\.int64"),
    "not finite": (lambda w: w | {"model.norm.weight": torch.full((64,), torch.nan)}, {}, "not finite.*damaged"),
    "too large for float16": (
        lambda w: w | {"model.norm.weight": torch.full((64,), 1e6)},
        {"dtype": torch.float16},
        r"`model\.norm\.weight` holds 1e\+06, too large for torch\.float16",
    ),
    "another config": (lambda w: w, {"config": {"hidden_size": 128}}, "64 in the weights and 128 in config.json"),
    "no such heads": (lambda w: w, {"config": {"num_attention_heads": 7}}, "7 heads for width 64; expected a divisor"),
    "contradicted heads": (lambda w: w, {"num_attention_heads": 2}, "2 heads; expected 4, as config.json says"),
    "contradicted grid": (lambda w: w, {"grid": 16}, "grid 16x16; expected 4x4, as config.json says"),
    "absurd grid": (lambda w: w, {"config": {"block_size": 10**12}}, "sides from 1 to 256"),
    "absurd prefix": (lambda w: w, {"config": {"cls_token_num": 10**9}}, "expected 1 to 120"),
    "another kind": (lambda w: w, {"kind": "head"}, "is of the kind llamagen; expected head"),
    "no kind": (lambda w: w, {"kind": "vae"}, "`kind` must be one of auto, llamagen"),
    "a dtype of no weights": (lambda w: w, {"dtype": torch.int8}, "`dtype` must be a floating dtype"),
    "no size": (lambda w: w, {"max_shard_size": "5 potatoes"}, "`max_shard_size` must be"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_bad_weights(case: str, tmp_path: Path) -> None:
    change, options, message = WEIGHTS[case]
    config = golden_config("llamagen_target") | options.get("config", {})
    source = folder(tmp_path / "in", change(golden("llamagen_target")), config, "bin")
    refused(source, tmp_path, message, **{key: value for key, value in options.items() if key != "config"})


def test_facts_that_nothing_tells_are_asked_for(tmp_path: Path) -> None:
    source = training_file(tmp_path / "weights.pt", foundation(golden("llamagen_target")))
    refused(source, tmp_path, r"width 64 without config\.json.*Pass --heads", grid=4)
    refused(source, tmp_path, r"the grid of an image is unknown.*Pass --grid", num_attention_heads=4)


def test_a_bad_config(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", golden("llamagen_drafter"), golden_config("llamagen_drafter"), "bin")
    for content, message in (
        (b"{", "is no JSON"),
        (b"[]", "holds a list"),
        (b"[" * 10**5, "is no JSON"),
        (b'{"rope_scaling": {"type": "llama3"}}', "rope_scaling"),
        (b'{"swin_norm": true}', "swin_norm"),
        (b'{"hidden_act": "gelu"}', "hidden_act"),
        (b'{"num_attention_heads": 4, "hidden_size": 128}', "`hidden_size` is 64 in the weights; expected 128"),
        (b'{"num_attention_heads": 4, "vocab_size": 7}', r"of shape \(128, 64\); expected \(7, 64\)"),
    ):
        (source / "config.json").write_bytes(content)
        refused(source, tmp_path, message)


def test_a_head_of_three_states(tmp_path: Path) -> None:
    weights = golden("llamagen_drafter") | {"fc.weight": torch.zeros(64, 192)}
    source = folder(tmp_path / "in", weights, golden_config("llamagen_drafter"), "bin")
    refused(source, tmp_path, r"`fc\.weight` of shape \(64, 192\); expected \(H, 2H\)")


def test_places_that_are_taken(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", golden("llamagen_drafter"), golden_config("llamagen_drafter"), "bin")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="is there already"):
        convert(source, tmp_path / "full")
    assert (tmp_path / "full" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        convert(tmp_path / "nowhere.pt", tmp_path / "new")
    with pytest.raises(ValueError, match="holds none"):
        convert(tmp_path / "full", tmp_path / "new")
