"""Train the emoji draft head on the training pictures' own codes.

python examples/emoji/train_head.py --data runs/emoji64.npz --vq runs/vq --target runs/target --out runs/head
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import VQModel
from emoji_data import load_emoji
from emoji_text import training_prompt
from train_target import encode_images
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from lantern_hf import LanternDraftModel, LanternPipeline, LlamaGenForConditionalGeneration
from lantern_hf.training import ConditionedSequences, PipelineConditioner, TrainingConfig, train_head


def main(args: argparse.Namespace) -> None:
    emoji = load_emoji(args.data, args.styles)
    codes = encode_images(args.vq, emoji.images)
    target = LlamaGenForConditionalGeneration.from_pretrained(args.target / "transformer").eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.target / "tokenizer")
    encoder = T5EncoderModel.from_pretrained(args.target / "text_encoder").eval()
    conditioner = PipelineConditioner(
        LanternPipeline(target, VQModel.from_pretrained(args.vq / "vq"), tokenizer, encoder)
    )

    def dataset(keep) -> ConditionedSequences:
        coin = torch.Generator().manual_seed(0)  # decides whether a prompt names the style
        pictures = zip(emoji.captions[keep], emoji.styles[keep], codes[torch.from_numpy(keep)], strict=True)
        rows = [{"prompt": training_prompt(str(c), str(s), coin), "tokens": tokens} for c, s, tokens in pictures]
        return ConditionedSequences(rows, conditioner)

    torch.manual_seed(args.seed)
    if args.init:
        head = LanternDraftModel.from_pretrained(args.init)
    else:
        head = LanternDraftModel.for_target(target, intermediate_size=args.intermediate)
    config = TrainingConfig(
        steps=args.steps,
        batch_size=args.batch_size,
        lr=args.lr,
        warmup_steps=min(50, args.steps),
        distribution_loss_weight=args.distribution_weight,
        max_grad_norm=1.0,
        feature_noise=args.noise,
        guidance_dropout=0.1,
        guidance_scale=args.guidance,
        ema_decay=args.ema,
        tree="wide_57",
        unroll_steps=args.unroll,
        mixed_precision="bf16",
        seed=args.seed,
        save_every=250,
        log_every=20,
    )
    train_head(
        target, dataset(~emoji.held_out), config, head=head, output_dir=args.out, eval_dataset=dataset(emoji.held_out)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/emoji64.npz"))
    parser.add_argument("--vq", type=Path, default=Path("runs/vq"))
    parser.add_argument("--target", type=Path, default=Path("runs/target"))
    parser.add_argument("--out", type=Path, default=Path("runs/head"))
    parser.add_argument("--styles", nargs="*", default=["noto", "fluent flat"])
    parser.add_argument("--init", type=Path, help="start from this head")
    parser.add_argument("--intermediate", type=int, default=448)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--distribution-weight", type=float, default=1.0)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--unroll", type=int, default=2)
    parser.add_argument("--guidance", type=float, default=3.0, help="train on distributions guided at this scale")
    parser.add_argument(
        "--ema", type=float, default=0.99, help="decay of the average of the weights that is kept as the head"
    )
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
