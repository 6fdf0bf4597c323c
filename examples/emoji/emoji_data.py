"""Captioned 64x64 emoji pictures: built from npm packages, or read from the `.npz` that a build left.

    python examples/emoji/emoji_data.py --out runs/emoji64.npz        # npm + resvg, about a minute

The art is Noto (Apache-2.0) and Fluent (MIT). Each npm package holds one `icons.json`, whose names are CLDR slugs such
as `face-with-tears-of-joy`, so that every picture comes with real text.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

# npm package -> (version, word for the style in a caption)
PACKAGES = {
    "noto": ("1.2.9", "noto"),
    "noto-v1": ("1.2.5", "blob"),
    "fluent-emoji-flat": ("1.2.6", "fluent flat"),
    "fluent-emoji": ("1.2.7", "fluent 3d"),
}
SIZE = 64
_TONE = re.compile(r"-(?:medium-light|medium-dark|light|medium|dark)(?:-skin-tone)?(?=-|$)")


@dataclass(frozen=True)
class EmojiSet:
    """Pictures with their captions.

    Attributes:
        images: `(M, 64, 64, 3)` uint8 RGB on white.
        captions: `(M,)` the concept, in lower-case words.
        styles: `(M,)` the style word of each picture.
        held_out: `(M,)` bool; True for the concepts kept out of training (a concept recurs in several styles, so a
            split by picture would leak).
    """

    images: np.ndarray
    captions: np.ndarray
    styles: np.ndarray
    held_out: np.ndarray

    def subset(self, keep: np.ndarray) -> EmojiSet:
        return EmojiSet(self.images[keep], self.captions[keep], self.styles[keep], self.held_out[keep])


def is_held_out(caption: str) -> bool:
    """Hold out a tenth of the concepts, by a hash of the caption, so that the split never depends on order or style."""
    return zlib.crc32(caption.encode()) % 10 == 0


def load_emoji(path: str | Path, styles: list[str] | None = None) -> EmojiSet:
    """Read the pictures of the named styles (all by default) from a `.npz` file."""
    with np.load(path) as data:
        images, captions, style = data["images"], data["captions"], data["styles"]
    held_out = np.array([is_held_out(str(caption)) for caption in captions])
    emoji = EmojiSet(images, captions, style, held_out)
    return emoji if styles is None else emoji.subset(np.isin(style, styles))


def _is_skin_tone(name: str, names: set[str]) -> bool:
    return "skin-tone" in name or (_TONE.search(name) is not None and _TONE.sub("", name) in names)


def _svgs(root: Path, package: str) -> Iterator[tuple[str, str]]:
    """Yield (slug, svg text) of one package, skin-tone copies left out."""
    icons = json.loads((root / "node_modules" / "@iconify-json" / package / "icons.json").read_text())
    names = set(icons["icons"])
    for name, icon in icons["icons"].items():
        if icon.get("hidden") or _is_skin_tone(name, names):
            continue
        box = [
            icon.get(key, icons.get(key, default))
            for key, default in zip(("left", "top", "width", "height"), (0, 0, 16, 16), strict=True)
        ]
        view = " ".join(str(value) for value in box)
        yield (
            name,
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{view}" '
            f'width="{box[2]}" height="{box[3]}">{icon["body"]}</svg>',
        )


def _render(svg: str) -> np.ndarray:
    """Render at twice the size on white and reduce, which smooths the edges."""
    import resvg_py

    large = 2 * SIZE
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=large, height=large))
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    picture.thumbnail((large, large))
    canvas = Image.new("RGBA", (large, large), (255, 255, 255, 255))
    canvas.alpha_composite(picture, ((large - picture.width) // 2, (large - picture.height) // 2))
    return np.asarray(canvas.convert("RGB").resize((SIZE, SIZE), Image.Resampling.LANCZOS))


def build(out: Path) -> None:
    """Install the npm packages into a temporary folder, render every picture, and write `out`."""
    images, captions, styles = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        wanted = [f"@iconify-json/{name}@{version}" for name, (version, _) in PACKAGES.items()]
        subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *wanted], cwd=folder, check=True
        )
        for package, (_, style) in PACKAGES.items():
            for name, svg in tqdm(list(_svgs(Path(folder), package)), desc=package):
                picture = _render(svg)
                if picture.std() < 1:  # some sources hold empty drawings
                    continue
                images.append(picture)
                captions.append(name.replace("-", " ").strip())
                styles.append(style)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.stem + ".tmp.npz")
    np.savez_compressed(temporary, images=np.stack(images), captions=np.array(captions), styles=np.array(styles))
    os.replace(temporary, out)
    print(f"{len(images)} pictures, {len(set(captions))} captions -> {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/emoji64.npz"))
    build(parser.parse_args().out)
