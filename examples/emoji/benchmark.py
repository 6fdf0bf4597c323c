"""Measure decoding of the emoji model: tokens a target pass, and seconds against plain decoding, interleaved in one
run.

    python examples/emoji/benchmark.py --out runs/benchmark.json

Times are taken one prompt at a time, every method on a prompt before the next prompt, so that a drift of the machine
meets all of them alike; passes are counted along the way. For the trees of `--count` passes are counted on 32 seen and
32 held-out prompts instead, in batches, which changes no row's tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from functools import reduce
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import diffusers
import torch
import transformers
from emoji_data import load_emoji
from emoji_text import encode_prompts, seen_and_unseen
from tqdm import tqdm

from lantern_hf import TREES, DecodingStats, LanternConfig, LanternPipeline
from lantern_hf.assets import embedded_model_path

RELAXED = {"lam": 3.0, "neighborhood_size": 10}


def settings_of(name: str) -> LanternConfig | None:
    """`plain`, `TREE strict` or `TREE lam 3 k 10`."""
    if name == "plain":
        return None
    tree, mode = name.split(maxsplit=1)
    return LanternConfig.strict(tree) if mode == "strict" else LanternConfig(tree=tree, **RELAXED)


def generators(seed: int, count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + index) for index in range(count)]


def count_steps(pipeline: LanternPipeline, prompts: list[str], config: LanternConfig | None, args) -> DecodingStats:
    """Statistics over all prompts."""
    merged: DecodingStats | None = None
    for start in range(0, len(prompts), args.batch_size):
        batch = prompts[start : start + args.batch_size]
        output = pipeline(
            batch,
            generator=generators(args.seed + start, len(batch)),
            lantern_config=config,
            guidance_scale=args.guidance,
            top_k=0,
            output_type="latent",
        )
        merged = output.stats if merged is None else merged.merge(output.stats)
    assert merged is not None
    return merged


def time_stock(pipeline: LanternPipeline, prompt: str, seed: int, guidance: float) -> float:
    """Seconds of transformers' own `model.generate(guidance_scale=...)` for one picture."""
    transformer = pipeline.transformer
    torch.manual_seed(seed)
    start = time.perf_counter()
    with torch.no_grad():
        features, mask = encode_prompts(pipeline.tokenizer, pipeline.text_encoder, [prompt])
    transformer.generate(
        input_ids=transformer.caption_ids(1),
        attention_mask=mask,
        caption_embeds=features,
        negative_prompt_ids=transformer.unconditional_ids(1),
        negative_prompt_attention_mask=mask,
        guidance_scale=guidance,
        do_sample=True,
        top_k=0,
        max_new_tokens=transformer.config.num_image_tokens,
    )
    return time.perf_counter() - start


def time_all(
    pipeline: LanternPipeline, prompts: list[str], names: list[str], args
) -> tuple[dict[str, list[float]], dict[str, DecodingStats]]:
    """Seconds of every method on every prompt, the order rotated from prompt to prompt, and statistics of each."""
    seconds: dict[str, list[float]] = {name: [] for name in [*names, "stock"]}
    steps: dict[str, DecodingStats] = {}
    for index, prompt in enumerate(tqdm(["warm-up", *prompts], desc="timing")):
        order = [*names, "stock"]
        order = order[index % len(order) :] + order[: index % len(order)]
        for name in order:
            start = time.perf_counter()
            if name == "stock":
                taken = time_stock(pipeline, prompt, args.seed, args.guidance)
            else:
                stats = count_steps(pipeline, [prompt], settings_of(name), args)
                taken = time.perf_counter() - start
                if index:
                    steps[name] = steps[name].merge(stats) if name in steps else stats
            if index:
                seconds[name].append(taken)
    return seconds, steps


def ratio(base: list[float], method: list[float]) -> dict[str, float]:
    """Median and quartiles of base over method, prompt by prompt: above 1 the method is faster."""
    pairs = [b / m for b, m in zip(base, method, strict=True)]
    low, _, high = quantiles(pairs, n=4)
    return {"median": median(pairs), "q25": low, "q75": high, "min": min(pairs), "max": max(pairs)}


def machine() -> dict[str, Any]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "diffusers": diffusers.__version__,
    }


def described(groups: dict[str, DecodingStats]) -> dict[str, Any]:
    """Passes over all groups of prompts, and over each."""
    both = reduce(DecodingStats.merge, groups.values())
    return {
        "prompts": len(both.new_tokens),
        "tokens_per_pass": both.tokens_per_pass,
        "relaxed_tv_per_token": both.relaxed_tv_per_token,
        "acceptance_per_depth": both.acceptance_per_depth,
        **{f"tokens_per_pass_{group}": value.tokens_per_pass for group, value in groups.items()},
    }


def main(args: argparse.Namespace) -> None:
    pipeline = LanternPipeline.from_pretrained(args.model or embedded_model_path(), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    emoji = load_emoji(args.data, args.styles)
    seen, unseen = seen_and_unseen(emoji.captions, emoji.held_out, args.prompts, args.seed)
    names = ["plain"] + [f"{tree} {mode}" for tree in args.trees for mode in ("strict", "lam 3 k 10")]
    result: dict[str, Any] = {"machine": machine(), "seed": args.seed, "guidance": args.guidance, "dtype": "float32"}
    half = args.timed // 2
    seconds, steps = time_all(pipeline, seen[:half] + unseen[: args.timed - half], names, args)
    result["steps"] = {name: described({"timed": stats}) for name, stats in steps.items()}
    for name in tqdm([name for name in names if name.split()[0] in args.count], desc="steps"):
        groups = {"seen": seen, "unseen": unseen}
        result["steps"][name] = described(
            {group: count_steps(pipeline, prompts, settings_of(name), args) for group, prompts in groups.items()}
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result["seconds"] = {name: {"median": median(values), "all": values} for name, values in seconds.items()}
    result["speed_over_plain"] = {name: ratio(seconds["plain"], values) for name, values in seconds.items()}
    result["speed_over_stock"] = {name: ratio(seconds["stock"], values) for name, values in seconds.items()}
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    for name in [*names, "stock"]:
        counts, speed = result["steps"].get(name, {}), result["speed_over_plain"][name]
        stock = result["speed_over_stock"][name]["median"]
        print(
            f"| {name} | {counts.get('tokens_per_pass', 1):.2f} | {counts.get('relaxed_tv_per_token', 0):.3f} | "
            f"{result['seconds'][name]['median']:.2f} | {speed['median']:.2f} "
            f"({speed['q25']:.2f}-{speed['q75']:.2f}) | {stock:.2f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/emoji64.npz"))
    parser.add_argument("--model", type=Path, help="default: the embedded model")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark.json"))
    parser.add_argument("--styles", nargs="*", default=["noto", "fluent flat"])
    parser.add_argument("--trees", nargs="+", default=list(TREES))
    parser.add_argument("--count", nargs="*", default=["wide_57"], help="trees to count passes of on all prompts")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--timed", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
