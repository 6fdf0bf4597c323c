"""What `lantern-hf generate` was asked for, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_hf.cli.errors import UserError


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `lantern-hf generate`; None is the model's or the library's default.

    Attributes:
        prompts: Texts, or labels of a class-conditional model.
        prompts_file: In place of them: a file of many.
        batch_size: Images drawn together, of many; None is 8.
        overwrite: Replace images of other prompts or settings, of many.
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
        out: File or folder; None is lantern.png, or the folder lantern-images for many.
        report: JSON file, or None.
        scale: Enlargement of the saved images.
        device: Device, or "auto".
        dtype: Dtype, or "auto".
    """

    prompts: tuple[str, ...] = ()
    prompts_file: Path | None = None
    batch_size: int | None = None
    overwrite: bool = False
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
    out: Path | None = None
    report: Path | None = None
    scale: int = 1
    device: str = "auto"
    dtype: str = "auto"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> GenerateOptions:
        """Make options of what the command line gave, refusing what does not go together.

        Raises:
            UserError: There is nothing to draw, or an option that would not be read.
        """
        options = cls(**{**values, "prompts": tuple(values["prompts"] or ())})
        if not options.prompts and options.prompts_file is None:
            raise UserError("Missing argument 'PROMPT...': name what to draw, or a file of prompts by --prompts.")
        many = options.prompts_file is not None
        others = (
            {"PROMPT": options.prompts, "--compare": options.compare}
            if many
            else {"--batch-size": options.batch_size, "--overwrite": options.overwrite}
        )
        if given := [name for name, value in others.items() if value]:
            rule = "--prompts and {} exclude each other. Leave one of them out." if many else "{} goes with --prompts."
            raise UserError(rule.format(given[0]))
        return options
