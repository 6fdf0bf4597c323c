"""Lumina-mGPT: text to images of any size, several tokens a pass.

    python examples/lumina_mgpt.py "a red fox in the snow" --height 768 --width 768 --vq vqgan.ckpt --head my-head

`--vq` is Meta's `vqgan.ckpt`, which comes with Chameleon's weights, or a folder of the converted model. The published
checkpoints hold no codebook, so the neighbour table is made from it. `--head` is a draft head: its folder or Hub id;
`lantern_hf.training.train_head` makes one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import VQModel
from tqdm import tqdm
from transformers import AutoTokenizer, ChameleonForConditionalGeneration

import lantern_hf
from lantern_hf import LanternConfig, NeighborTable, decode_images, image_prompts
from lantern_hf.models.vq import chameleon_vq


def load_vq(path: Path) -> VQModel:
    """Load a converted VQ model, or convert Meta's checkpoint."""
    if path.is_dir():
        return VQModel.from_pretrained(path)
    return chameleon_vq(torch.load(path, map_location="cpu", weights_only=True))


def main(arguments: list[str] | None = None) -> list[Path]:
    """Run the script and give the files it saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", default="Alpha-VLLM/Lumina-mGPT-7B-768")
    parser.add_argument("--vq", type=Path, required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--height", type=int, default=768, help="pixels, a multiple of 32")
    parser.add_argument("--width", type=int, default=768, help="pixels, a multiple of 32")
    parser.add_argument("--guidance-scale", type=float, default=4.0)
    parser.add_argument("--lam", type=float, default=2.0)
    parser.add_argument("--neighbors", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = ChameleonForConditionalGeneration.from_pretrained(args.model, dtype="auto", device_map="auto")
    vq = load_vq(args.vq).to(model.device)
    table = NeighborTable.from_codebook(vq.quantize.embedding.weight.detach().float(), args.neighbors)
    lantern_hf.attach(model, assistant=args.head, neighbors=table)

    inputs = image_prompts(
        model,
        tokenizer,
        args.prompts,
        guidance_scale=args.guidance_scale,
        height=args.height,
        width=args.width,
    )
    with tqdm(unit="pass") as bar:
        output = model.generate(
            **inputs,
            lantern_config=LanternConfig(neighborhood_size=args.neighbors, lam=args.lam),
            generator=[torch.Generator().manual_seed(args.seed + row) for row in range(len(args.prompts))],
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


if __name__ == "__main__":
    main()
