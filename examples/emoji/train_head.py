"""Train the emoji draft head with `lantern-hf train`, on the training pictures' own codes.

    python examples/emoji/train_head.py --data runs/emoji64.npz --vq runs/vq --target runs/target --out runs/head

Writes what the command reads, the target as a pipeline and a line of JSON for each picture, and runs it. Further
options go to `lantern-hf train` as they are and win over those here: `--unroll-steps 1`, `--steps 2000`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import VQModel
from emoji_data import load_emoji
from emoji_text import training_prompt
from train_target import encode_images
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from lantern_hf import LanternPipeline, LlamaGenForConditionalGeneration
from lantern_hf.cli.app import app

SETTINGS = {
    "--steps": 900,
    "--batch-size": 8,
    "--lr": 2e-3,
    "--warmup-steps": 50,
    "--max-grad-norm": 1.0,
    "--head-intermediate": 448,
    "--distribution-loss-weight": 1.0,
    "--guidance-scale": 3.0,
    "--unroll-steps": 2,
    "--ema-decay": 0.99,
    "--eval-sequences": 64,
    "--tree": "wide_57",
    "--mixed-precision": "bf16",
    "--device": "cpu",
    "--save-every": 300,
    "--log-every": 20,
}


def write_pipeline(args: argparse.Namespace, folder: Path) -> None:
    """Save the target as a pipeline without a head."""
    LanternPipeline(
        transformer=LlamaGenForConditionalGeneration.from_pretrained(args.target / "transformer"),
        vq_model=VQModel.from_pretrained(args.vq / "vq"),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(args.target / "tokenizer"),
        text_encoder=T5EncoderModel.from_pretrained(args.target / "text_encoder"),
    ).save_pretrained(folder)


def write_sequences(args: argparse.Namespace, path: Path) -> None:
    """Write prompt and codes of every training picture; half of the prompts name the style."""
    emoji = load_emoji(args.data, args.styles)
    emoji = emoji.subset(~emoji.held_out)
    coin = torch.Generator().manual_seed(args.seed)
    with path.open("w", encoding="utf-8") as file:
        for caption, style, tokens in zip(
            emoji.captions, emoji.styles, encode_images(args.vq, emoji.images).tolist(), strict=True
        ):
            row = {"prompt": training_prompt(str(caption), str(style), coin), "tokens": tokens}
            file.write(json.dumps(row) + "\n")


def main(args: argparse.Namespace, further: Sequence[str] = ()) -> None:
    inputs = args.out.with_name(args.out.name + "-inputs")
    inputs.mkdir(parents=True, exist_ok=True)
    write_pipeline(args, inputs / "pipeline")
    write_sequences(args, inputs / "sequences.jsonl")
    settings = {
        "--model": inputs / "pipeline",
        "--data": inputs / "sequences.jsonl",
        "--output-dir": args.out,
        "--seed": args.seed,
        **SETTINGS,
    }
    command = [str(part) for option in settings.items() for part in option]
    app(["train", *command, *further], standalone_mode=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/emoji64.npz"))
    parser.add_argument("--vq", type=Path, default=Path("runs/vq"))
    parser.add_argument("--target", type=Path, default=Path("runs/target"))
    parser.add_argument("--out", type=Path, default=Path("runs/head"))
    parser.add_argument("--styles", nargs="*", default=["noto", "fluent flat"])
    parser.add_argument("--seed", type=int, default=0)
    main(*parser.parse_known_args())
