"""Put the trained parts together in the layout of `LanternPipeline.save_pretrained`, in half precision, with a card.

    python examples/emoji/build_bundle.py --out runs/bundle
    python examples/emoji/evaluate.py --model runs/bundle && python examples/emoji/benchmark.py --model runs/bundle
    python examples/emoji/build_bundle.py --out lantern_hf/assets/emoji --quality runs/quality/quality.json \\
        --benchmark runs/benchmark.json --guidance 2 --top-k 5 --tree narrow_8

The second call writes the measured figures into the card; they are read from the files, never typed.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import VQModel
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from lantern_hf import (
    LanternConfig,
    LanternDraftModel,
    LanternPipeline,
    LlamaGenForConditionalGeneration,
    NeighborTable,
)

CARD = """---
license: apache-2.0
library_name: lantern_hf
pipeline_tag: text-to-image
tags: [lantern, speculative-decoding, llamagen, emoji]
---

# Emoji 64: the embedded model of lantern_hf

A small text-to-image model on the code path of LlamaGen: a T5-style text encoder with a word tokenizer, a LlamaGen
transformer, a VQ model (64x64 pixels, 16x16 codes), a LANTERN draft head and its neighbour table. It is there to try,
test and measure decoding, not to draw well: it knows the emoji it was trained on, and guesses at others.

| part | parameters |
|---|---|
{parts}

**Data.** {pictures} pictures of Noto (Apache-2.0) and Fluent flat (MIT) emoji, from the npm packages
`@iconify-json/noto` 1.2.9 and `@iconify-json/fluent-emoji-flat` 1.2.6, captioned by their names; a tenth of the
concepts is held out. The last runs of the transformer, and the head, saw Fluent flat alone, so that is the style it
draws. Weights: Apache-2.0.

**Training.** `examples/emoji/`: `emoji_data.py`, `train_vq.py` (three runs), `train_target.py` (eight),
`train_head.py` (four), `build_bundle.py`; two CPU cores. {times}

**Figures.** {figures}
"""


def count(module: torch.nn.Module) -> str:
    return f"{sum(p.numel() for p in module.parameters()) / 1e6:.2f}M"


def last_seconds(log: Path) -> float:
    """Seconds a training run took, from the last line of its log that tells them; NaN without one."""
    lines = log.read_text().splitlines() if log.exists() else []
    return next((record["seconds"] for line in reversed(lines) if "seconds" in (record := json.loads(line))), math.nan)


def figures(args: argparse.Namespace) -> str:
    """What the evaluation and the benchmark measured, as sentences."""
    lines = []
    if args.quality:
        quality: dict[str, Any] = json.loads(args.quality.read_text())
        lines.append(
            f"VQ reconstructions of held-out concepts {quality['vq_psnr_held_out']:.1f} dB. Validation NLL "
            f"{quality['nll']:.2f} nats a code, mean top-1 probability {quality['top1']:.2f}. KID on "
            f"EfficientNet-Lite0 features (128 px, {quality['samples']} plain samples at {quality['best']}, against "
            "the training pictures) "
            f"{quality['kid']:.3f}; VQ reconstructions alone {quality['kid_reconstructions']:.3f}, held-out pictures "
            f"{quality['kid_held_out_pictures']:.3f}."
        )
    if args.benchmark:
        benchmark: dict[str, Any] = json.loads(args.benchmark.read_text())
        steps = benchmark["steps"]
        lines.append(
            f"Tokens a target pass at guidance {benchmark['guidance']:g}, T = 1, no top-k, tree `wide_57`: "
            f"{steps['wide_57 strict']['tokens_per_pass']:.2f} strict, "
            f"{steps['wide_57 lam 3 k 10']['tokens_per_pass']:.2f} with lam 3 and 10 neighbours "
            f"(relaxed_tv {steps['wide_57 lam 3 k 10']['relaxed_tv_per_token']:.3f} a token)."
        )
    return " ".join(lines) or "Not measured yet."


def main(args: argparse.Namespace) -> None:
    transformer = LlamaGenForConditionalGeneration.from_pretrained(args.target / "transformer")
    transformer.config._name_or_path = "emoji"
    text_encoder = T5EncoderModel.from_pretrained(args.target / "text_encoder")
    vq = VQModel.from_pretrained(args.vq / "vq")
    vq.register_to_config(_name_or_path="emoji")
    head = LanternDraftModel.from_pretrained(args.head)
    head.config.verifier = {"name_or_path": "emoji", "architectures": [type(transformer).__name__]}
    head.config.lantern_config = LanternConfig(tree=args.tree, lam=args.lam, neighborhood_size=10).to_dict()
    parts = {"text encoder": text_encoder, "LlamaGen transformer": transformer, "VQ model": vq, "draft head": head}
    table = "\n".join(f"| {name} | {count(module)} |" for name, module in parts.items())
    for module in parts.values():
        module.half()
    head.neighbors = NeighborTable.from_codebook(vq.quantize.embedding.weight.float(), args.neighbors)
    pipeline = LanternPipeline(
        transformer=transformer,
        vq_model=vq,
        tokenizer=PreTrainedTokenizerFast.from_pretrained(args.target / "tokenizer"),
        text_encoder=text_encoder,
        draft_head=head,
        guidance_scale=args.guidance,
        top_k=args.top_k,
    )
    temporary = args.out.with_name(args.out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    pipeline.save_pretrained(temporary)
    runs = {
        "VQ": [args.vq, *args.vq_before],
        "target": [args.target, *args.target_before],
        "head": [args.head, *args.head_before],
    }
    minutes = {name: sum(last_seconds(run / "log.jsonl") for run in part) / 60 for name, part in runs.items()}
    times = "Minutes: " + ", ".join(f"{name} {value:.0f}" for name, value in minutes.items()) + "."
    card = CARD.format(parts=table, pictures=args.pictures, times=times, figures=figures(args))
    (temporary / "README.md").write_text(card)
    shutil.rmtree(args.out, ignore_errors=True)
    temporary.rename(args.out)
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vq", type=Path, default=Path("runs/vq"))
    parser.add_argument("--vq-before", type=Path, nargs="*", default=[Path("runs/vq0"), Path("runs/vq1")])
    parser.add_argument("--target", type=Path, default=Path("runs/target"))
    parser.add_argument("--target-before", type=Path, nargs="*", default=[Path(f"runs/target{i}") for i in range(7)])
    parser.add_argument("--head", type=Path, default=Path("runs/head"))
    parser.add_argument("--head-before", type=Path, nargs="*", default=[Path(f"runs/head{i}") for i in range(3)])
    parser.add_argument("--out", type=Path, default=Path("runs/bundle"))
    parser.add_argument("--quality", type=Path)
    parser.add_argument("--benchmark", type=Path)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--tree", default="eagle_25")
    parser.add_argument("--lam", type=float, default=3.0)
    parser.add_argument("--neighbors", type=int, default=128)
    parser.add_argument("--pictures", type=int, default=2927)
    main(parser.parse_args())
