"""Make a `LanternPipeline` of LlamaGen's published files, and draw with it.

    python examples/convert_llamagen.py --target t2i_XL_stage1_256.pt --vq vq_ds16_t2i.pt \\
        --head jadohu/llamagen_drafter --text-encoder google/flan-t5-xl --out llamagen-lantern "a red fox"

A class-conditional target (`c2i_XL_384.pt`) takes the number of a class in place of a text, and no text encoder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lantern_hf import LanternPipeline
from lantern_hf.convert import convert_pipeline


def main(args: argparse.Namespace) -> None:
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    reports = convert_pipeline(
        args.target,
        args.out,
        vq=args.vq,
        head=args.head,
        text_encoder=args.text_encoder,
        dtype=dtype,
        grid=args.grid,
        verify=True,
        progress=True,
    )
    for report in reports:
        print("\n".join(report.lines()))
    pipe = LanternPipeline.from_pretrained(args.out, dtype=dtype).to(args.device)
    classes = pipe.transformer.config.conditioning == "class"
    what = {"class_labels": int(args.prompt)} if classes else {"prompt": args.prompt}
    output = pipe(**what, generator=torch.Generator().manual_seed(args.seed))
    output.images[0].save(args.out.with_suffix(".png"))
    if output.stats is not None:
        tokens = pipe.transformer.config.num_image_tokens
        print(f"{args.out.with_suffix('.png')}: {tokens} tokens in {output.stats.passes} passes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", help="text, or the number of a class")
    parser.add_argument("--target", required=True)
    parser.add_argument("--vq", required=True)
    parser.add_argument("--head")
    parser.add_argument("--text-encoder")
    parser.add_argument("--out", type=Path, default=Path("llamagen-lantern"))
    parser.add_argument("--grid", type=int, help="side of the image in tokens, where the name does not tell it")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
