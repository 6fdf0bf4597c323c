"""Text to image in the manner of diffusers, with any family of targets: several tokens a pass, saved as one folder.

    python examples/diffusers_pipeline.py "a red fox" "a blue bird" --model Emu3-community/Emu3-Gen-hf \
        --head me/emu3-lantern-head --out pictures --save my-emu3
    python examples/diffusers_pipeline.py "a red fox" --pipeline my-emu3 --out pictures

The first makes a pipeline of a transformers checkpoint, its processor and a draft head; with `--save` all of them
become a folder. The second loads such a folder, or a Hub id. Anole and Lumina-mGPT need `--vq` as well, a folder of
their VQ model as a `diffusers.VQModel` (`lantern-hf convert vqgan.ckpt --out vq`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import VQModel
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from lantern_hf import LanternConfig, LanternPipeline


def arguments() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", default="Emu3-community/Emu3-Gen-hf", help="Hub id or folder of a target")
    source.add_argument("--pipeline", help="Hub id or folder of a saved pipeline")
    parser.add_argument("--head", help="Hub id or folder of a draft head; without one, one token a pass")
    parser.add_argument("--vq", help="Hub id or folder of the VQ model, where the target has no decoder")
    parser.add_argument("--negative-prompt")
    parser.add_argument("--guidance-scale", type=float, help="the family's own by default")
    parser.add_argument(
        "--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="pixels, where there is a choice"
    )
    parser.add_argument("--lam", type=float, default=2.0, help="LANTERN++'s relative bound")
    parser.add_argument("--images", type=int, default=1, help="images of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", help="such as bfloat16; the checkpoint's by default")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the images")
    parser.add_argument("--save", type=Path, help="folder to save the pipeline to")
    return parser


def load(args: argparse.Namespace) -> LanternPipeline:
    """Load a pipeline, or make one of a target."""
    if args.pipeline is not None:
        return LanternPipeline.from_pretrained(args.pipeline)
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=args.dtype, device_map="auto")
    try:
        processor = AutoProcessor.from_pretrained(args.model)
    except (OSError, ValueError):  # some checkpoints bring a tokenizer alone
        processor = AutoTokenizer.from_pretrained(args.model)
    vq_model = None if args.vq is None else VQModel.from_pretrained(args.vq).to(model.device)
    return LanternPipeline.from_target(model, processor, args.head, vq_model=vq_model)


def main(argv: list[str] | None = None) -> list[Path]:
    """Generate and save; gives the files of the images."""
    args = arguments().parse_args(argv)
    pipe = load(args)
    pipe.enable_progress()
    height, width = args.size or (None, None)
    output = pipe(
        args.prompts,
        negative_prompt=args.negative_prompt,
        height=height,
        width=width,
        guidance_scale=args.guidance_scale,
        num_images_per_prompt=args.images,
        lantern_config=LanternConfig(lam=args.lam) if pipe.draft_head is not None else None,
        generator=[torch.Generator().manual_seed(args.seed + n) for n in range(len(args.prompts) * args.images)],
    )
    print(f"{output.stats.tokens_per_pass:.2f} tokens a pass")
    args.out.mkdir(parents=True, exist_ok=True)
    files = [args.out / f"{number:03}.png" for number in range(len(output.images))]
    for file, image in zip(files, output.images, strict=True):
        image.save(file)
    if args.save is not None:
        pipe.save_pretrained(args.save)
    return files


if __name__ == "__main__":
    main()
