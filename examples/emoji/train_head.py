"""Train the emoji draft head with `lantern-hf train`, on the codes of the training pictures and on the target's draws.

    python examples/emoji/train_head.py --data runs/emoji64.npz --vq runs/vq --target runs/target --out runs/head

Writes what the command reads, the target as a pipeline and a line of JSON for each sequence, and runs it.
`--own-draws 1024` has `lantern-hf distil` draw that many sequences first: decoding goes over the target's own draws,
which are not its training pictures. Further options go to `lantern-hf train` as they are and win over those here:
`--unroll-steps 1`, `--steps 2000`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import VQModel
from emoji_data import load_emoji
from emoji_text import training_prompt
from train_target import encode_images
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from lantern_hf import LanternPipeline, LlamaGenForConditionalGeneration
from lantern_hf.cli.app import app
from lantern_hf.training import read_rows

GUIDANCE = 3.0  # of what is drawn and of what the head learns to draft
SETTINGS = {
    "--steps": 900,
    "--batch-size": 8,
    "--lr": 2e-3,
    "--warmup-steps": 50,
    "--max-grad-norm": 1.0,
    "--distribution-loss-weight": 1.0,
    "--guidance-scale": GUIDANCE,
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


def write_sequences(args: argparse.Namespace, inputs: Path) -> Path:
    """Write prompt and codes of every training picture and of every own draw; half of the prompts name the style."""
    emoji = load_emoji(args.data, args.styles)
    emoji = emoji.subset(~emoji.held_out)
    coin = torch.Generator().manual_seed(args.seed)
    captions, styles = [str(caption) for caption in emoji.captions], [str(style) for style in emoji.styles]
    codes = encode_images(args.vq, emoji.images).tolist()
    prompts = [training_prompt(*pair, coin) for pair in zip(captions, styles, strict=True)]
    rows = [{"prompt": prompt, "tokens": row} for prompt, row in zip(prompts, codes, strict=True)]
    for name, count, mix in (("draws", args.own_draws, False), ("mixed-draws", args.mixed_draws, True)):
        if count:
            rows += own_draws(args, inputs, name, prompts_to_draw(captions, styles, count, mix, coin))
    path = inputs / "sequences.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prompts_to_draw(captions: list[str], styles: list[str], count: int, mix: bool, coin: torch.Generator) -> list[str]:
    """Draw training captions; to mix joins half of each to half of another, which makes what nobody has drawn."""
    prompts = []
    for index in torch.randint(len(captions), (count,), generator=coin).tolist():
        words = captions[index].split()
        if mix:
            other = captions[int(torch.randint(len(captions), (), generator=coin))].split()
            words = words[: (len(words) + 1) // 2] + other[len(other) // 2 :]
        prompts.append(training_prompt(" ".join(words), styles[index], coin))
    return prompts


def own_draws(args: argparse.Namespace, inputs: Path, name: str, prompts: list[str]) -> list[dict[str, Any]]:
    """Have the target draw a sequence for every prompt; a run that was stopped goes on."""
    asked, drawn = inputs / f"{name}.txt", inputs / name
    asked.write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")
    options = {
        "--model": inputs / "pipeline",
        "--prompts": asked,
        "--output-dir": drawn,
        "--guidance-scale": GUIDANCE,
        "--top-k": 0,
        "--batch-size": 64,
        "--seed": args.seed,
        "--device": "cpu",
    }
    run_command("distil", options)
    return [row | {"tokens": row["tokens"].tolist()} for row in read_rows(drawn)]


def run_command(name: str, options: dict[str, Any], further: Sequence[str] = ()) -> None:
    """Run a command of `lantern-hf` in this process."""
    app([name, *(str(part) for option in options.items() for part in option), *further], standalone_mode=False)


def main(args: argparse.Namespace, further: Sequence[str] = ()) -> None:
    inputs = args.out.with_name(args.out.name + "-inputs")
    inputs.mkdir(parents=True, exist_ok=True)
    write_pipeline(args, inputs / "pipeline")
    options = {
        "--model": inputs / "pipeline",
        "--data": write_sequences(args, inputs),
        "--output-dir": args.out,
        "--seed": args.seed,
        **({"--init-head": args.init_head} if args.init_head else {"--head-intermediate": 448}),
        **SETTINGS,
    }
    run_command("train", options, further)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/emoji64.npz"))
    parser.add_argument("--vq", type=Path, default=Path("runs/vq"))
    parser.add_argument("--target", type=Path, default=Path("runs/target"))
    parser.add_argument("--out", type=Path, default=Path("runs/head"))
    parser.add_argument("--styles", nargs="*", default=["noto", "fluent flat"])
    parser.add_argument("--own-draws", type=int, default=0, help="sequences that the target draws itself")
    parser.add_argument("--mixed-draws", type=int, default=0, help="the same, by halves of two captions")
    parser.add_argument("--init-head", type=Path, help="folder of a head to start from")
    parser.add_argument("--seed", type=int, default=0)
    main(*parser.parse_known_args())
