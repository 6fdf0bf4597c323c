"""Anole: text to images, or text and images in one answer, several tokens a pass.

    python examples/anole.py "a red fox in the snow" --vq vqgan.ckpt --head my-anole-head --out pictures
    python examples/anole.py "Explain with pictures how to fold a paper crane." --interleaved --vq vqgan.ckpt ...

`--vq` is Meta's `vqgan.ckpt`, which comes with Chameleon's weights, or a folder of the converted model. `--head` is a
draft head: its folder or Hub id; `lantern_hf.training.train_head` makes one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import VQModel
from tqdm import tqdm
from transformers import AutoTokenizer, ChameleonForConditionalGeneration

import lantern_hf
from lantern_hf import LanternConfig, decode_images, image_prompts
from lantern_hf.models.vq import chameleon_vq
from lantern_hf.targets import adapter_for


def load_vq(path: Path) -> VQModel:
    """Load a converted VQ model, or convert Meta's checkpoint."""
    if path.is_dir():
        return VQModel.from_pretrained(path)
    return chameleon_vq(torch.load(path, map_location="cpu", weights_only=True))


def draw(model, tokenizer, vq: VQModel, args: argparse.Namespace) -> list[Path]:
    """Save one image a prompt."""
    inputs = image_prompts(model, tokenizer, args.prompts, guidance_scale=args.guidance_scale)
    generators = [torch.Generator().manual_seed(args.seed + row) for row in range(len(args.prompts))]
    with tqdm(unit="pass") as bar:
        output = model.generate(
            **inputs,
            lantern_config=LanternConfig(neighborhood_size=args.neighbors, lam=args.lam),
            generator=generators,
            do_sample=True,
            top_k=2000,
            return_dict_in_generate=True,
            on_round=lambda session: bar.update(),
        )
    print(output.stats)
    saved = []
    for row, (image,) in enumerate(decode_images(model, inputs["input_ids"], output.sequences, vq)):
        saved.append(args.out / f"{row:03d}.png")
        image.save(saved[-1])
    return saved


def tell(model, tokenizer, vq: VQModel, args: argparse.Namespace) -> list[Path]:
    """Answer one prompt with text and images, and save the images."""
    prompt = tokenizer(f"{tokenizer.bos_token}{args.prompts[0]}{tokenizer.sep_token}", add_special_tokens=False)
    ids = torch.tensor([prompt["input_ids"]], device=model.device)
    options = {"interleaved": True}
    sequences = model.generate(
        ids,
        lantern_config=LanternConfig(neighborhood_size=args.neighbors, lam=args.lam),
        target_options=options,
        generator=torch.Generator().manual_seed(args.seed),
        do_sample=True,
        max_new_tokens=args.max_new_tokens,
    )
    images = iter(decode_images(model, ids, sequences, vq, target_options=options)[0])
    saved = []
    for part in adapter_for(model, ids, **options).segments(sequences[:, ids.shape[1] :])[0]:
        if part.ndim == 1:
            print(tokenizer.decode(part, skip_special_tokens=True))
            continue
        saved.append(args.out / f"{len(saved):03d}.png")
        next(images).save(saved[-1])
        print(f"[{saved[-1]}]")
    return saved


def main(arguments: list[str] | None = None) -> list[Path]:
    """Run the script and give the files it saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", default="leloy/Anole-7b-v0.1-hf")
    parser.add_argument("--vq", type=Path, required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--interleaved", action="store_true", help="text and images in one answer to one prompt")
    parser.add_argument("--guidance-scale", type=float, default=3.0)
    parser.add_argument("--lam", type=float, default=2.0)
    parser.add_argument("--neighbors", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=3000, help="with --interleaved")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    args = parser.parse_args(arguments)
    if args.interleaved and len(args.prompts) > 1:
        parser.error("--interleaved takes one prompt")
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = ChameleonForConditionalGeneration.from_pretrained(args.model, dtype="auto", device_map="auto")
    vq = load_vq(args.vq).to(model.device)
    lantern_hf.attach(model, assistant=args.head)
    return (tell if args.interleaved else draw)(model, tokenizer, vq, args)


if __name__ == "__main__":
    main()
