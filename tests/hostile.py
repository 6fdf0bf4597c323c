"""Malformed draft heads: each a change to a sound folder, and what the refusal must say.

As a script it tries all of them in one process, with the address space limited to 1 GB more than loading a sound head
takes, and prints what happened and how far the memory grew.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Build = Callable[[Path], None]
WEIGHTS, CONFIG, INDEX, TABLE = (
    "model.safetensors",
    "config.json",
    "model.safetensors.index.json",
    "neighbors.safetensors",
)


def config(**changes: Any) -> Build:
    """Change values of the config."""

    def build(folder: Path) -> None:
        values = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(values | changes))

    return build


def write(name: str, content: bytes | str) -> Build:
    """Replace a file."""
    data = content.encode() if isinstance(content, str) else content

    def build(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return build


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Build:
    """Change the weights and save them soundly."""

    def build(folder: Path) -> None:
        # copies, since the loaded ones lie in the file that is written over
        weights = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
        change(weights)
        save_file(weights, folder / WEIGHTS, {"format": "pt"})

    return build


def raw(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file from its parts, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def sparse(name: str, size: int, start: bytes = b"") -> Build:
    """A file that claims many bytes and holds few."""

    def build(folder: Path) -> None:
        (folder / name).write_bytes(start)
        os.truncate(folder / name, size)

    return build


def index(weight_map: Any) -> Build:
    """Weights in shards, as an index tells."""

    def build(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
        shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return build


def table(indices: torch.Tensor, k: Any = None, codes: Any = None, kind: str = "lantern_hf.neighbors/1") -> Build:
    """A neighbour table, as its metadata tell."""
    metadata = {
        "format": kind,
        "metric": "l2",
        "k": str(k or indices.shape[-1]),
        "num_codes": str(codes or len(indices)),
    }

    def build(folder: Path) -> None:
        save_file({"indices": indices.contiguous()}, folder / TABLE, metadata)

    return build


def remove(*names: str) -> Build:
    """Take files away."""

    def build(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return build


def pickled(name: str) -> Build:
    """Weights as a pickle in the place of the safetensors."""

    def build(folder: Path) -> None:
        weights = {key: tensor.clone() for key, tensor in load_file(folder / WEIGHTS).items()}
        torch.save(weights, folder / name)
        if name != WEIGHTS:
            (folder / WEIGHTS).unlink()

    return build


def cut(name: str, count: int) -> Build:
    """Lose the end of a file."""

    def build(folder: Path) -> None:
        os.truncate(folder / name, (folder / name).stat().st_size - count)

    return build


def renamed(old: str, new: str) -> Build:
    """Give a tensor another name."""
    return tensors(lambda weights: weights.__setitem__(new, weights.pop(old)))


_ROWS = (torch.arange(24)[:, None] + torch.arange(1, 5)) % 24  # a sound table of 24 codes
_FC = "fc.weight"
_TERABYTES = {"fc.weight": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}}
_OVERLAP = {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("fc.weight", "fc.bias")}

CASES: dict[str, tuple[Build, str]] = {
    "config: no JSON": (write(CONFIG, "{"), "is not valid JSON"),
    "config: not text": (write(CONFIG, b"\xff\xfe\x00"), "is not valid JSON"),
    "config: a list": (write(CONFIG, "[]"), "must hold a JSON object, got list"),
    "config: deep": (write(CONFIG, '{"a":' * 100_000), "is not valid JSON"),
    "config: large": (write(CONFIG, b" " * 2**21), "2,097,152 bytes, where at most 1,048,576"),
    "config: missing": (remove(CONFIG), "There is no file .*config.json"),
    "config: another model": (config(model_type="llama"), "`model_type` is 'llama', not 'lantern_draft'"),
    "config: no model": (config(model_type=None), "`model_type` is None"),
    "config: width of a petabyte": (
        config(hidden_size=10**12),
        r"`hidden_size` must be a whole number in \[1, 65536\]",
    ),
    "config: terabytes within the limits": (
        config(hidden_size=65536, intermediate_size=2**18, target_hidden_size=65536, head_dim=64, num_hidden_layers=64),
        "do not fit its config.*missing_keys",
    ),
    "config: a billion layers": (
        config(num_hidden_layers=10**9),
        r"`num_hidden_layers` .* in \[1, 64\], got 1000000000",
    ),
    "config: endless grid": (config(grid=[4096, 4096]), "rotary table of .* elements, at most"),
    "config: grid of floats": (config(grid=[8.0, 8.0]), "`grid` must be"),
    "config: a string for a number": (config(hidden_size="32"), "`hidden_size` must be a whole number"),
    "config: no heads": (config(num_attention_heads=0), "`num_attention_heads` must be a whole number"),
    "config: negative": (config(prefix_length=-5), "`prefix_length` must be a whole number"),
    "config: infinite": (config(rope_theta=float("inf")), "`rope_theta` must be a number"),
    "config: unknown dtype": (config(dtype="float77"), "`dtype` must be one of"),
    "config: a later format": (config(format_version=99), "`format_version` 99.*Upgrade it"),
    "config: unknown activation": (config(hidden_act="os.system"), "`hidden_act` must be an activation"),
    "config: verifier as text": (config(verifier="a/b"), "`verifier` must be a dict"),
    "config: settings out of range": (config(lantern_config={"lam": 0.5}), "`lam` must be"),
    "config: settings of another type": (config(lantern_config={"neighborhood_size": "many"}), "no config of a draft"),
    "config: a tree of 10,000 nodes": (
        config(lantern_config={"tree": [[rank] for rank in range(10_000)]}),
        "`choices` has 10000 nodes, at most .* are allowed",
    ),
    "config: wider than the weights": (
        config(intermediate_size=96),
        r"mismatched_keys.*\[48, 32\].*implies \[96, 32\]",
    ),
    "config: deeper than the weights": (config(num_hidden_layers=2), r"missing_keys.*layers\.1"),
    "weights: missing": (remove(WEIGHTS), r"holds no model\.safetensors"),
    "weights: empty": (write(WEIGHTS, b""), "not a safetensors file, or is cut off"),
    "weights: text": (write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), "not a safetensors file"),
    "weights: a pickle by its name": (pickled("pytorch_model.bin"), "can run code when it is read"),
    "weights: a pickle by another name": (pickled(WEIGHTS), "not a safetensors file"),
    "weights: header longer than the file": (write(WEIGHTS, raw({}, length=2**63)), "is cut off"),
    "weights: header of 100 MB": (
        sparse(WEIGHTS, 2**27, struct.pack("<Q", 10**8)),
        "header of 100,000,000|config implies at",
    ),
    "weights: header is no JSON": (write(WEIGHTS, raw(b"{{{{")), "is damaged"),
    "weights: header of another kind": (write(WEIGHTS, raw([1])), "is damaged"),
    "weights: cut off": (cut(WEIGHTS, 100), "is damaged"),
    "weights: a tensor of terabytes": (write(WEIGHTS, raw(_TERABYTES)), "is damaged"),
    "weights: tensors that overlap": (write(WEIGHTS, raw(_OVERLAP, bytes(16))), "is damaged"),
    "weights: a file of terabytes": (sparse(WEIGHTS, 2**41), "where the config implies at most"),
    "weights: one missing": (tensors(lambda weights: weights.pop("fc.bias")), r"missing_keys.*fc\.bias"),
    "weights: one too many": (tensors(lambda weights: weights.update(x=torch.zeros(1))), "unexpected_keys.*x"),
    "weights: a thousand too many": (
        tensors(lambda weights: weights.update({f"x{i}": torch.zeros(1) for i in range(1000)})),
        "and 995 more",
    ),
    "weights: another name": (renamed(_FC, "module.fc.weight"), r"missing_keys.*unexpected_keys.*module\.fc"),
    "weights: another shape": (
        tensors(lambda weights: weights.update({_FC: torch.zeros(32, 65)})),
        r"mismatched_keys.*fc\.weight \[32, 65\], the config implies \[32, 64\]",
    ),
    "weights: whole numbers": (
        tensors(lambda weights: weights.update({_FC: weights[_FC].long()})),
        r"dtypes.*fc\.weight I64",
    ),
    "weights: eight bits": (
        tensors(lambda weights: weights.update({_FC: weights[_FC].to(torch.float8_e4m3fn)})),
        r"dtypes.*fc\.weight F8_E4M3",
    ),
    "weights: not a number": (tensors(lambda weights: weights[_FC].fill_(float("nan"))), "holds NaN or infinity"),
    "weights: infinite": (tensors(lambda weights: weights[_FC][0].fill_(float("inf"))), "holds NaN or infinity"),
    "index: climbs out": (index({_FC: "../../../etc/passwd"}), r"names the file '\.\./\.\./\.\./etc/passwd'"),
    "index: elsewhere": (index({_FC: "/etc/passwd"}), "names the file '/etc/passwd'"),
    "index: a pickle": (index({_FC: "pytorch_model-00001-of-00002.bin"}), "names the file 'pytorch_model"),
    "index: empty": (index({}), "it has no `weight_map`"),
    "index: no map": (index([WEIGHTS]), "it has no `weight_map`"),
    "index: a missing file": (index({_FC: "model-00009-of-00009.safetensors"}), "00009.*which is missing"),
    "index: a tensor twice": (
        index({"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}),
        "for the second time",
    ),
    "index: very many files": (
        index({str(i): f"model-{i:05d}-of-00099.safetensors" for i in range(99)}),
        "names 99 files, at most 64",
    ),
    "folder: an adapter": (write("adapter_config.json", "{}"), "no draft head but an adapter"),
    "table: empty": (write(TABLE, b""), "is not a safetensors file"),
    "table: text": (write(TABLE, "nothing"), "is not a safetensors file"),
    "table: of terabytes": (sparse(TABLE, 2**41), "where at most .* make sense for a neighbor table"),
    "table: another format": (table(_ROWS.int(), kind="x"), "is not a neighbor table: format 'x'"),
    "table: of another codebook": (table((_ROWS[:20] % 20).int()), "covers 20 codes, but this head .* of 24"),
    "table: of floats": (table(_ROWS.float()), "with a uint16 or int32 tensor"),
    "table: of long numbers": (table(_ROWS.long()), "with a uint16 or int32 tensor"),
    "table: one column less than it says": (table(_ROWS.int(), k=9), "holds 24 x 4 indices but says 24 x 9"),
    "table: flat": (table(_ROWS.int().flatten(), k=4, codes=24), "is not a neighbor table"),
    "table: past the codebook": (table((_ROWS + 1).int()), r"must be in \[0, 24\)"),
    "table: negative": (table((_ROWS - 1).int()), r"must be in \[0, 24\)"),
    "table: a code in its own row": (table(torch.zeros(24, 4, dtype=torch.int32)), "Code 0 is in its own row"),
    "table: wider than the codebook": (table(torch.ones(24, 24, dtype=torch.int32)), "1 <= k < K"),
}


def refusal(sound: Path, work: Path, name: str) -> str:
    """Build a case beside the sound head, and give what loading it raises."""
    from lantern_hf import LanternDraftModel

    folder = work / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    CASES[name][0](folder)
    try:
        LanternDraftModel.from_pretrained(folder)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def main(sound: Path, work: Path) -> None:
    """Try every case and print the refusals, the peak growth in bytes, as JSON."""
    from lantern_hf import LanternDraftModel

    LanternDraftModel.from_pretrained(sound)  # whatever loading takes once is taken now
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, resource.RLIM_INFINITY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusals = {}
    for name in CASES:
        sys.stderr.write(f"{name}\n")  # whoever dies of a case can be told by the last line
        refusals[name] = refusal(sound, work, name)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    sys.stdout.write(json.dumps({"refusals": refusals, "grown": grown}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
