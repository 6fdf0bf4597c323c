"""Text to image with GLM-Image: diffusers' own pipeline, its autoregressive prior decoded several tokens a pass.

    python examples/glm_image.py "a red fox in the snow" --head me/glm-image-lantern-head --out fox.png

Without a head, train one: docs/families/glm-image.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import GlmImagePipeline

import lantern_hf


def arguments() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--model", default="zai-org/GLM-Image", help="Hub id or folder of the pipeline")
    parser.add_argument("--head", required=True, help="Hub id or folder of a draft head for its prior")
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50, help="denoising steps")
    parser.add_argument("--neighborhood-size", type=int, default=10, help="0 keeps the prior's distribution exactly")
    parser.add_argument("--lam", type=float, default=2.0, help="LANTERN++'s relative bound")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("glm-image.png"))
    return parser


def main(argv: list[str] | None = None) -> Path:
    """Generate and save; gives the file."""
    args = arguments().parse_args(argv)
    pipe = GlmImagePipeline.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device)
    config = lantern_hf.LanternConfig(neighborhood_size=args.neighborhood_size, lam=args.lam)
    # The pipeline calls `generate` by itself, and knows nothing of heads: hence `default_on`.
    lantern_hf.attach(pipe.vision_language_encoder, args.head, config, default_on=True)

    image = pipe(
        args.prompt,
        height=args.height,
        width=args.width,
        num_inference_steps=args.steps,
        generator=torch.Generator(args.device).manual_seed(args.seed),
    ).images[0]
    image.save(args.out)
    return args.out


if __name__ == "__main__":
    main()
