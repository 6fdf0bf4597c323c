"""Text to image through `transformers.pipeline`, several tokens a pass.

    python examples/transformers_pipeline.py "a red fox" "a blue bird" \
        --model Emu3-community/Emu3-Gen-hf --head me/emu3-lantern-head --out pictures
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import pipeline

import lantern_hf


def arguments() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", default="Emu3-community/Emu3-Gen-hf", help="Hub id or folder of the target")
    parser.add_argument("--head", help="Hub id or folder of its draft head; without one, one token a pass")
    parser.add_argument("--negative-prompt")
    parser.add_argument("--guidance-scale", type=float, help="the family's own by default")
    parser.add_argument(
        "--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="pixels, where there is a choice"
    )
    parser.add_argument("--lam", type=float, default=2.0, help="LANTERN++'s relative bound")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder")
    return parser


def main(argv: list[str] | None = None) -> list[Path]:
    """Generate and save; gives the files."""
    args = arguments().parse_args(argv)
    pipe = pipeline("lantern-text-to-image", model=args.model, assistant=args.head, device_map="auto")
    height, width = args.size or (None, None)
    images = pipe(
        args.prompts,
        negative_prompt=args.negative_prompt,
        guidance_scale=args.guidance_scale,
        height=height,
        width=width,
        lantern_config=lantern_hf.LanternConfig(lam=args.lam) if args.head else None,
        batch_size=args.batch_size,
        seed=args.seed,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    files = [args.out / f"{number:03}.png" for number in range(len(images))]
    for file, image in zip(files, images, strict=True):
        image.save(file)
    return files


if __name__ == "__main__":
    main()
