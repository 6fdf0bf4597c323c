"""Measure the emoji model's pictures: KID over guidance and top-k, VQ quality, and contact sheets to look at.

    python examples/emoji/evaluate.py --data runs/emoji64.npz --model runs/bundle --out runs/quality

All pictures are decoded plainly, the best setting found by `--sweep` pictures each, the final figure on `--samples`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from emoji_data import EmojiSet, load_emoji
from emoji_text import seen_and_unseen
from features import features, kernel_distance, load_network
from PIL import Image
from tqdm import tqdm
from train_target import TextToCodes, encode_images, validate
from train_vq import to_pixels

from lantern_hf import LanternPipeline
from lantern_hf.models.vq import decode_codes, encode_pixels


def sample(pipeline: LanternPipeline, prompts: list[str], seed: int, batch_size: int = 64, **settings) -> np.ndarray:
    """Pictures `(M, 64, 64, 3)` uint8, one generator a picture, so that batching does not change them."""
    pictures = []
    for start in tqdm(range(0, len(prompts), batch_size), desc=str(settings), leave=False):
        batch = prompts[start : start + batch_size]
        generators = [torch.Generator().manual_seed(seed + start + index) for index in range(len(batch))]
        pictures.append(pipeline(batch, generator=generators, lantern_config=None, output_type="np", **settings).images)
    return (np.concatenate(pictures) * 255).round().astype(np.uint8)


def contact_sheet(pictures: np.ndarray, columns: int = 8, scale: int = 2) -> Image.Image:
    """Pictures in rows, each enlarged `scale` times."""
    rows = -(-len(pictures) // columns)
    side = pictures.shape[1] * scale
    sheet = Image.new("RGB", (columns * side, rows * side), "white")
    for index, picture in enumerate(pictures):
        tile = Image.fromarray(picture).resize((side, side), Image.Resampling.LANCZOS)
        sheet.paste(tile, ((index % columns) * side, (index // columns) * side))
    return sheet


def reconstruction(pipeline: LanternPipeline, network, emoji: EmojiSet, real: torch.Tensor) -> dict[str, float]:
    """PSNR of held-out concepts through the VQ model, and KID of reconstructed training pictures."""
    held_out, seen = emoji.images[emoji.held_out], emoji.images[~emoji.held_out][:512]

    def through(images: np.ndarray) -> np.ndarray:
        batches = [to_pixels(images[start : start + 64]) for start in range(0, len(images), 64)]
        decoded = [decode_codes(pipeline.vq_model, encode_pixels(pipeline.vq_model, batch)) for batch in batches]
        pixels = ((torch.cat(decoded).clamp(-1, 1) + 1) * 127.5).round()
        return pixels.permute(0, 2, 3, 1).numpy().astype(np.uint8)

    error = ((through(held_out).astype(np.float64) - held_out) / 255) ** 2
    psnr = float((-10 * np.log10(error.mean((1, 2, 3)).clip(1e-9))).mean())
    return {"vq_psnr_held_out": psnr, "kid_reconstructions": kernel_distance(features(network, through(seen)), real)}


def likelihood(pipeline: LanternPipeline, args: argparse.Namespace, emoji: EmojiSet) -> dict[str, float]:
    """NLL and entropy in nats a code, and the mean top-1 probability, on the pictures of held-out concepts."""
    held_out = emoji.subset(emoji.held_out)
    model = TextToCodes(pipeline.text_encoder, pipeline.transformer, pipeline.tokenizer)
    captions = [str(caption) for caption in held_out.captions]
    return validate(model, captions, encode_images(args.vq, held_out.images), bf16=False)


def training_prompts(emoji: EmojiSet, count: int, seed: int) -> list[str]:
    """Captions with their styles, drawn from the training pictures."""
    chosen = np.random.default_rng(seed).choice(np.flatnonzero(~emoji.held_out), count, replace=False)
    return [f"{emoji.captions[i]}, {emoji.styles[i]}" for i in chosen]


def main(args: argparse.Namespace) -> None:
    torch.set_grad_enabled(False)
    args.out.mkdir(parents=True, exist_ok=True)
    emoji = load_emoji(args.data, args.styles)
    pipeline = LanternPipeline.from_pretrained(args.model, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    network = load_network()
    real = features(network, emoji.images[~emoji.held_out])
    result: dict = {"kid_held_out_pictures": kernel_distance(features(network, emoji.images[emoji.held_out]), real)}
    result |= reconstruction(pipeline, network, emoji, real) | likelihood(pipeline, args, emoji)
    sweep = {}
    for scale in args.guidance:
        for top_k in args.top_k:
            pictures = sample(pipeline, training_prompts(emoji, args.sweep, 1), 0, guidance_scale=scale, top_k=top_k)
            sweep[f"guidance {scale:g}, top-k {top_k}"] = kernel_distance(features(network, pictures), real)
            print(scale, top_k, round(sweep[f"guidance {scale:g}, top-k {top_k}"], 4), flush=True)
    result["sweep"] = sweep
    best = min(sweep, key=sweep.__getitem__)
    scale, top_k = float(best.split()[1].rstrip(",")), int(best.split()[-1])
    pictures = sample(pipeline, training_prompts(emoji, args.samples, 2), 10_000, guidance_scale=scale, top_k=top_k)
    result |= {"best": best, "samples": args.samples, "kid": kernel_distance(features(network, pictures), real)}
    result["sheets"] = f"guidance {args.sheet_guidance:g}, top-k {args.sheet_top_k}"
    seen, unseen = seen_and_unseen(emoji.captions, emoji.held_out, 32, args.seed)
    for name, prompts in {"seen": seen, "unseen": unseen}.items():
        sheet = contact_sheet(
            sample(pipeline, prompts, 20_000, guidance_scale=args.sheet_guidance, top_k=args.sheet_top_k)
        )
        sheet.save(args.out / f"{name}.png")
        (args.out / f"{name}.txt").write_text("\n".join(prompts) + "\n")
    (args.out / "quality.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/emoji64.npz"))
    parser.add_argument("--model", type=Path, default=Path("runs/bundle"))
    parser.add_argument("--vq", type=Path, default=Path("runs/vq"))
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--styles", nargs="*", default=["noto", "fluent flat"])
    parser.add_argument("--guidance", type=float, nargs="+", default=[2.0, 3.0, 4.0])
    parser.add_argument("--top-k", type=int, nargs="+", default=[0, 100])
    parser.add_argument("--sweep", type=int, default=96)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--sheet-guidance", type=float, default=3.0, help="of the contact sheets")
    parser.add_argument("--sheet-top-k", type=int, default=0, help="of the contact sheets")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
