"""LANTERN++ for Hugging Face: visual autoregressive models in transformers, decoded several tokens a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lantern_hf._version import __version__
from lantern_hf.attach import attach, check_tree_support, detach
from lantern_hf.candidates import CandidateTree, LanternCandidateGenerator
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftConfig, LanternDraftModel
from lantern_hf.models.configuration_llamagen import LlamaGenConfig
from lantern_hf.models.llamagen import LlamaGenForConditionalGeneration
from lantern_hf.neighbors import NeighborTable
from lantern_hf.outputs import LanternGenerateOutput
from lantern_hf.processors import ImageTokensLogitsProcessor, RelaxedAcceptanceLogitsProcessor
from lantern_hf.stats import DecodingStats
from lantern_hf.strategy import lantern_generate
from lantern_hf.tree import TREES, DraftTree

if TYPE_CHECKING:
    from lantern_hf.pipeline import LanternPipeline

__all__ = [
    "TREES",
    "CandidateTree",
    "DecodingStats",
    "DraftTree",
    "ImageTokensLogitsProcessor",
    "LanternCandidateGenerator",
    "LanternConfig",
    "LanternDraftConfig",
    "LanternDraftModel",
    "LanternGenerateOutput",
    "LanternPipeline",
    "LlamaGenConfig",
    "LlamaGenForConditionalGeneration",
    "NeighborTable",
    "RelaxedAcceptanceLogitsProcessor",
    "__version__",
    "attach",
    "check_tree_support",
    "detach",
    "lantern_generate",
]


def __getattr__(name: str) -> Any:
    """Import what needs diffusers only when it is asked for."""
    if name == "LanternPipeline":
        from lantern_hf.pipeline import LanternPipeline

        return LanternPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
