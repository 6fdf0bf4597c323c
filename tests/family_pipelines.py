"""A row a family for the tests of `LanternPipeline`: a tiny target of the real classes and what stands beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import tiny_head
from tiny_chameleon import tiny_anole, tiny_lumina, tiny_tokenizer, tiny_vq
from tiny_emu3 import emu3_processor, tiny_emu3
from tiny_families import janus_processor, tiny_janus
from transformers import PreTrainedModel

from lantern_hf import LanternConfig, LanternPipeline

TREE = LanternConfig("chain_5", 5, lam=3.0)


def seed(value: int = 0) -> torch.Generator:
    """A fresh generator."""
    return torch.Generator().manual_seed(value)


@dataclass(frozen=True)
class Drawer:
    """A family in a pipeline.

    Attributes:
        name: Name of the family.
        make: Gives the tiny target, always with the same weights.
        processor: Gives its processor or tokenizer.
        prompts: Two prompts of unequal length.
        grid: Height and width of its images in codes.
        size: Width and height in pixels.
        wish: Arguments of a call that ask for this size.
        decoder: Gives a VQ model to stand beside the target, where it needs one.
    """

    name: str
    make: Callable[[], PreTrainedModel]
    processor: Callable[[], Any]
    prompts: tuple[str, str]
    grid: tuple[int, int]
    size: tuple[int, int]
    wish: dict[str, int] = field(default_factory=dict)
    decoder: Callable[[Any], Any] = lambda model: None

    def pipe(self, model: Any = None, head: Any = "new", **kwargs: Any) -> LanternPipeline:
        """A pipeline of a target that is loaded, with an untrained head, and without a bar."""
        model = self.make() if model is None else model
        head = tiny_head(model) if isinstance(head, str) else head
        pipe = LanternPipeline.from_target(model, self.processor(), head, vq_model=self.decoder(self.make()), **kwargs)
        pipe.enable_progress(False)
        return pipe

    def draw(self, pipe: LanternPipeline, prompts: Any = None, **kwargs: Any) -> Any:
        """Images of a size, relaxed, from seed 0 unless told otherwise."""
        settings = {"lantern_config": TREE, "generator": seed()} | self.wish | kwargs
        return pipe(list(self.prompts) if prompts is None else prompts, **settings)


WORDS, TEXTS = ("word3", "word1 word2 word9"), ("a red fox", "hi")
DRAWERS = (
    Drawer("anole", tiny_anole, tiny_tokenizer, WORDS, (4, 4), (8, 8), {}, tiny_vq),
    Drawer("lumina", tiny_lumina, tiny_tokenizer, WORDS, (4, 6), (12, 8), {"height": 8, "width": 12}, tiny_vq),
    Drawer("emu3", tiny_emu3, emu3_processor, TEXTS, (3, 4), (32, 24), {"height": 24, "width": 32}),
    Drawer("janus", tiny_janus, janus_processor, ("a red fox", "a bird this is"), (4, 4), (16, 16)),
)
BY_NAME = {drawer.name: drawer for drawer in DRAWERS}

every_drawer = pytest.mark.parametrize("drawer", DRAWERS, ids=lambda drawer: drawer.name)
