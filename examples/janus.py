"""Text to image with Janus or Janus-Pro, several tokens a pass.

    python examples/janus.py "a red fox in the snow" --head me/janus-pro-1b-lantern-head --out fox.png

Without a head for your checkpoint, train one: docs/families/janus.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoProcessor, JanusForConditionalGeneration

import lantern_hf


def arguments() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--model", default="deepseek-community/Janus-Pro-1B", help="Hub id or folder of the target")
    parser.add_argument("--head", required=True, help="Hub id or folder of its draft head")
    parser.add_argument("--guidance-scale", type=float, default=5.0)
    parser.add_argument("--images", type=int, default=1, help="images of the prompt")
    parser.add_argument("--neighborhood-size", type=int, default=10, help="0 keeps Janus' own distribution exactly")
    parser.add_argument("--lam", type=float, default=2.0, help="LANTERN++'s relative bound")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", help="such as bfloat16; the checkpoint's by default")
    parser.add_argument("--out", type=Path, default=Path("janus.png"))
    return parser


def main(argv: list[str] | None = None) -> list[Path]:
    """Generate and save; gives the files."""
    args = arguments().parse_args(argv)
    processor = AutoProcessor.from_pretrained(args.model)
    model = JanusForConditionalGeneration.from_pretrained(args.model, dtype=args.dtype, device_map="auto")
    lantern_hf.attach(model, assistant=args.head)

    messages = [{"role": "user", "content": [{"type": "text", "text": args.prompt}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=[text], generation_mode="image", return_tensors="pt").to(model.device)
    config = lantern_hf.LanternConfig(neighborhood_size=args.neighborhood_size, lam=args.lam)
    output = model.generate(
        **inputs,
        generation_mode="image",
        do_sample=True,
        guidance_scale=args.guidance_scale,
        num_return_sequences=args.images,
        lantern_config=config,
        generator=torch.Generator(model.device).manual_seed(args.seed),
        return_dict_in_generate=True,
    )
    print(f"{output.stats.tokens_per_pass:.2f} tokens a pass")

    # Channels first: without torchvision the processor knows no other order.
    pixels = model.decode_image_tokens(output.sequences).permute(0, 3, 1, 2)
    images = processor.postprocess(list(pixels.float()), return_tensors="PIL.Image.Image")["pixel_values"]
    files = [args.out.with_stem(f"{args.out.stem}-{i}") if args.images > 1 else args.out for i in range(args.images)]
    for file, image in zip(files, images, strict=True):
        image.save(file)
    return files


if __name__ == "__main__":
    main()
