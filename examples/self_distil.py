"""Have a model generate the sequences its draft head is trained on; stop and start it as you like.

python examples/self_distil.py --model someone/llamagen-lantern --prompts prompts.txt --out runs/sequences
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lantern_hf import LanternPipeline
from lantern_hf.training import DistilConfig, PipelineConditioner, read_prompts, self_distil


def main(args: argparse.Namespace) -> None:
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    pipe = LanternPipeline.from_pretrained(args.model, dtype=dtype)
    conditioner = PipelineConditioner(pipe.to(args.device))
    config = DistilConfig(
        sequences_per_prompt=args.per_prompt,
        guidance_scale=pipe.config.guidance_scale,  # as the model will be used
        batch_size=args.batch_size,
        shard_size=args.shard_size,
    )
    shards = self_distil(conditioner, read_prompts(args.prompts), args.out, config, assistant=pipe.draft_head)
    print(f"{len(shards)} shards in {args.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/sequences"))
    parser.add_argument("--per-prompt", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--shard-size", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    main(parser.parse_args())
