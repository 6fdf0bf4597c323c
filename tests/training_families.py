"""A row a family for the tests of training: a tiny target of the real classes, its processor, and a size to draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from family_pipelines import DRAWERS, Drawer
from tiny_families import glm_image_processor, tiny_glm_image

from lantern_hf.training import ProcessorConditioner, TokenBatch, collate
from lantern_hf.training.binding import bound_adapter


@dataclass(frozen=True)
class Pupil(Drawer):
    """A family that a head is trained for.

    Attributes:
        tokens: Tokens of an image.
    """

    tokens: int = 0

    def conditioner(self, target: Any = None, **size: int) -> ProcessorConditioner:
        """A conditioner of the target and its processor, at the row's size unless told otherwise."""
        target = self.make() if target is None else target
        return ProcessorConditioner(
            target, self.processor(), vq_model=self.decoder(target), **(size if size else self.wish)
        )

    @property
    def rows(self) -> list[dict[str, str]]:
        """The prompts as rows."""
        return [{"prompt": prompt} for prompt in self.prompts]


COUNTS = {"anole": 16, "lumina": 4 * 7 + 1, "emu3": 3 * 5 + 3, "janus": 16}
# GLM-Image's small grid is much larger than this large one of 2 x 2 codes: 16 x 16.
GLM = Pupil(
    "glm_image",
    tiny_glm_image,
    glm_image_processor,
    ("a red fox", "blue"),
    (2, 2),
    (64, 64),
    {"height": 64, "width": 64},
    tokens=2 * 2 + 16 * 16 + 1,
)
PUPILS = (
    *(Pupil(**vars(drawer), tokens=COUNTS[drawer.name]) for drawer in DRAWERS),
    GLM,
)
BY_NAME = {pupil.name: pupil for pupil in PUPILS}

every_pupil = pytest.mark.parametrize("pupil", PUPILS, ids=lambda pupil: pupil.name)


def batch_of(conditioner: Any, rows: list[dict[str, Any]], tokens: torch.Tensor) -> tuple[TokenBatch, Any]:
    """A batch of rows with their answers, and its adapter."""
    items = [row | {"tokens": own} for row, own in zip(conditioner.encode_prompts(rows), tokens, strict=True)]
    batch = collate(items)
    return batch, bound_adapter(conditioner.target, batch.prompt, conditioner.target_options)


def any_image(conditioner: Any, rows: int, seed: int = 0) -> torch.Tensor:
    """Tokens of images of random codes, laid out as the family's, `(rows, T)`."""
    layout = conditioner._layout(conditioner.size)
    codes = torch.randint(
        len(layout.token_ids), (rows, len(layout.forced)), generator=torch.Generator().manual_seed(seed)
    )
    return torch.where(layout.forced < 0, layout.token_ids[codes], layout.forced)
