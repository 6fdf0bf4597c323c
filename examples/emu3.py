"""Text to image with Emu3, several tokens a pass.

    python examples/emu3.py "a red fox in the snow" --head me/emu3-lantern-head --out fox.png

Without a head for your checkpoint, train one: docs/families/emu3.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoProcessor, Emu3ForConditionalGeneration

import lantern_hf
from lantern_hf import Emu3ImageLayout

QUALITY = " masterpiece, film grained, best quality."
NEGATIVE = "lowres, bad anatomy, bad hands, text, error, extra digit, cropped, worst quality, low quality, blurry."


def arguments() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--model", default="Emu3-community/Emu3-Gen-hf", help="Hub id or folder of the target")
    parser.add_argument("--head", required=True, help="Hub id or folder of its draft head")
    parser.add_argument("--negative-prompt", default=NEGATIVE)
    parser.add_argument("--guidance-scale", type=float, default=3.0)
    parser.add_argument("--ratio", default="1:1", help="width to height")
    parser.add_argument("--area", type=int, default=720 * 720, help="pixels; the published model is made for 720 x 720")
    parser.add_argument("--neighborhood-size", type=int, default=10, help="0 keeps Emu3's own distribution exactly")
    parser.add_argument("--lam", type=float, default=2.0, help="LANTERN++'s relative bound")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", help="such as bfloat16; the checkpoint's by default")
    parser.add_argument("--out", type=Path, default=Path("emu3.png"))
    return parser


def main(argv: list[str] | None = None) -> Path:
    """Generate and save; gives the file."""
    args = arguments().parse_args(argv)
    processor = AutoProcessor.from_pretrained(args.model)
    model = Emu3ForConditionalGeneration.from_pretrained(args.model, dtype=args.dtype, device_map="auto")
    lantern_hf.attach(model, assistant=args.head)

    shape = {"return_for_image_generation": True, "ratio": args.ratio, "image_area": args.area, "return_tensors": "pt"}
    inputs = processor(text=[args.prompt + QUALITY], **shape)
    negative = processor(text=[args.negative_prompt], **shape)
    height, width = inputs.pop("image_sizes")[0]
    layout = Emu3ImageLayout.for_model(model, [height, width])
    output = model.generate(
        **inputs.to(model.device),
        negative_prompt_ids=negative["input_ids"].to(model.device),
        negative_prompt_attention_mask=negative["attention_mask"].to(model.device),
        guidance_scale=args.guidance_scale,
        do_sample=True,
        top_k=2048,
        max_new_tokens=layout.num_tokens,
        prefix_allowed_tokens_fn=layout,
        lantern_config=lantern_hf.LanternConfig(neighborhood_size=args.neighborhood_size, lam=args.lam),
        generator=torch.Generator(model.device).manual_seed(args.seed),
        return_dict_in_generate=True,
    )
    print(f"{output.stats.tokens_per_pass:.2f} tokens a pass")

    tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
    pixels = model.decode_image_tokens(image_tokens=tokens, height=height, width=width)
    images = processor.postprocess(list(pixels.float()), return_tensors="PIL.Image.Image")["pixel_values"]
    images[0].save(args.out)
    return args.out


if __name__ == "__main__":
    main()
