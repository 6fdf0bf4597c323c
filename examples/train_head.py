"""Train a draft head for a pipeline on sequences that `self_distil.py` made, and draw with it.

python examples/train_head.py --model someone/llamagen-lantern --data runs/sequences --out runs/head
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lantern_hf import LanternPipeline
from lantern_hf.training import ConditionedSequences, PipelineConditioner, TrainingConfig, read_rows, train_head


def main(args: argparse.Namespace) -> None:
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    pipe = LanternPipeline.from_pretrained(args.model, dtype=dtype)
    conditioner = PipelineConditioner(pipe.to(args.device))
    rows = read_rows(args.data)
    held_out = max(len(rows) // 20, 1)
    config = TrainingConfig(
        steps=args.steps,
        batch_size=args.batch_size,
        lr=args.lr,
        unroll_steps=2,  # depth 2 of the tree is trained for, too
        ema_decay=0.999,
        mixed_precision="bf16" if args.device == "cuda" else "no",
    )
    head = train_head(
        pipe.transformer,
        ConditionedSequences(rows[held_out:], conditioner),
        config,
        output_dir=args.out,
        eval_dataset=ConditionedSequences(rows[:held_out], conditioner),
    )
    pipe.register_modules(draft_head=head)
    output = pipe(rows[0]["prompt"], generator=torch.Generator().manual_seed(0))
    output.images[0].save(args.out / "sample.png")
    print(f"{output.stats.tokens_per_pass:.2f} tokens a pass; head and sample.png are in {args.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, default=Path("runs/sequences"))
    parser.add_argument("--out", type=Path, default=Path("runs/head"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    main(parser.parse_args())
