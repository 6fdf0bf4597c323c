"""What `lantern-hf generate` was asked for, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `lantern-hf generate`; None is the model's or the library's default.

    Attributes:
        prompts: Texts, or labels of a class-conditional model.
        model: Folder or Hub id; None is the embedded model.
        compare: Also decode plainly.
        seed: Image number i draws from seed + i.
        lam: See `LanternConfig`, also the next three.
        neighborhood_size: Neighbours.
        delta: Absolute cap.
        tree: Preset name.
        strict: Strict acceptance.
        guidance_scale: Guidance.
        top_k: Codes to draw from.
        temperature: Softmax temperature.
        num_images: Images of each prompt.
        out: File or folder.
        report: JSON file, or None.
        scale: Enlargement of the saved images.
        device: Device, or "auto".
        dtype: Dtype, or "auto".
    """

    prompts: tuple[str, ...]
    model: str | None = None
    compare: bool = False
    seed: int = 0
    lam: float | None = None
    neighborhood_size: int | None = None
    delta: float | None = None
    tree: str | None = None
    strict: bool = False
    guidance_scale: float | None = None
    top_k: int | None = None
    temperature: float = 1.0
    num_images: int = 1
    out: Path = Path("lantern.png")
    report: Path | None = None
    scale: int = 1
    device: str = "auto"
    dtype: str = "auto"
