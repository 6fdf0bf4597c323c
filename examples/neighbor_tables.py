"""Build a neighbour table, save it, and say what that took.

python examples/neighbor_tables.py --codes 16384 --width 8 --metric cosine --k 1000      # random codebook
python examples/neighbor_tables.py --vq FOLDER --k 100 --out neighbors.safetensors       # of a diffusers VQModel
"""

from __future__ import annotations

import argparse
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lantern_hf import NeighborTable


def load_codebook(args: argparse.Namespace) -> torch.Tensor:
    """The codebook of a VQ model, or a random one of the same shape."""
    if args.vq is None:
        return torch.randn(args.codes, args.width, generator=torch.Generator().manual_seed(args.seed))
    from diffusers import VQModel

    return VQModel.from_pretrained(args.vq).quantize.embedding.weight.detach().float()


def peak_memory() -> int:
    """Most memory that the process ever held, torch included, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Build and save; give what it took."""
    codebook = load_codebook(args)
    before, start = peak_memory(), time.perf_counter()
    table = NeighborTable.from_codebook(codebook, args.k, args.metric)
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        path = table.save(args.out or Path(folder) / "neighbors.safetensors")
        size = path.stat().st_size
        NeighborTable.load(path).check(codebook)
    return {
        "codebook": f"{tuple(codebook.shape)} {args.metric}",
        "k": table.k,
        "seconds": round(seconds, 2),
        "peak_mib": peak_memory() >> 20,
        "of_which_before_mib": before >> 20,
        "file_mib": round(size / 2**20, 2),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


def parser() -> argparse.ArgumentParser:
    """Options of the script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--vq", help="folder or Hub id of a diffusers VQModel, instead of a random codebook")
    options.add_argument("--codes", type=int, default=16384)
    options.add_argument("--width", type=int, default=8)
    options.add_argument("--metric", choices=("l2", "cosine"), default="l2")
    options.add_argument("--k", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, help="file to keep the table in")
    return options


if __name__ == "__main__":
    for name, value in run(parser().parse_args()).items():
        print(f"{name:>20}  {value}")
