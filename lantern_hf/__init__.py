"""LANTERN++ for Hugging Face: visual autoregressive models in transformers, decoded several tokens a pass.

Everything below is imported when it is first asked for, so that `import lantern_hf` and `lantern-hf --help` take no
time. transformers' Auto classes know `lantern_draft` and `llamagen` from that moment on: before
`AutoModel.from_pretrained`, ask for the class (`from lantern_hf import LanternDraftModel`), or load with
`LanternDraftModel.from_pretrained` itself. `transformers.pipeline` knows the task `lantern-text-to-image` at once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lantern_hf._registration import register_task
from lantern_hf._version import __version__

if TYPE_CHECKING:
    from lantern_hf.attach import attach, detach
    from lantern_hf.candidates import CandidateTree, LanternCandidateGenerator
    from lantern_hf.config import LanternConfig
    from lantern_hf.draft import LanternDraftConfig, LanternDraftModel
    from lantern_hf.hub import CardDetails
    from lantern_hf.images import decode_images, image_prompts
    from lantern_hf.many import ImageRequest, ManyReport, generate_many, read_requests
    from lantern_hf.models.configuration_llamagen import LlamaGenConfig
    from lantern_hf.models.llamagen import LlamaGenForConditionalGeneration
    from lantern_hf.neighbor_cache import cached_neighbors
    from lantern_hf.neighbors import NeighborTable
    from lantern_hf.outputs import LanternGenerateOutput
    from lantern_hf.pipeline import LanternPipeline, LanternPipelineOutput, embedded_pipeline
    from lantern_hf.processors import ImageTokensLogitsProcessor, RelaxedAcceptanceLogitsProcessor
    from lantern_hf.stats import DecodingStats
    from lantern_hf.strategy import lantern_generate
    from lantern_hf.targets import TargetAdapter, register_target
    from lantern_hf.targets.emu3_layout import Emu3ImageLayout
    from lantern_hf.transformers_pipeline import LanternTextToImagePipeline
    from lantern_hf.tree import TREES, DraftTree
    from lantern_hf.tree_support import check_tree_support

__all__ = [
    "TREES",
    "CandidateTree",
    "CardDetails",
    "DecodingStats",
    "DraftTree",
    "Emu3ImageLayout",
    "ImageRequest",
    "ImageTokensLogitsProcessor",
    "LanternCandidateGenerator",
    "LanternConfig",
    "LanternDraftConfig",
    "LanternDraftModel",
    "LanternGenerateOutput",
    "LanternPipeline",
    "LanternPipelineOutput",
    "LanternTextToImagePipeline",
    "LlamaGenConfig",
    "LlamaGenForConditionalGeneration",
    "ManyReport",
    "NeighborTable",
    "RelaxedAcceptanceLogitsProcessor",
    "TargetAdapter",
    "__version__",
    "attach",
    "cached_neighbors",
    "check_tree_support",
    "decode_images",
    "detach",
    "embedded_pipeline",
    "generate_many",
    "image_prompts",
    "lantern_generate",
    "read_requests",
    "register_target",
]

_MODULES = {
    "attach": "attach detach",
    "candidates": "CandidateTree LanternCandidateGenerator",
    "config": "LanternConfig",
    "draft": "LanternDraftConfig LanternDraftModel",
    "hub": "CardDetails",
    "images": "decode_images image_prompts",
    "many": "ImageRequest ManyReport generate_many read_requests",
    "models.configuration_llamagen": "LlamaGenConfig",
    "models.llamagen": "LlamaGenForConditionalGeneration",
    "neighbor_cache": "cached_neighbors",
    "neighbors": "NeighborTable",
    "outputs": "LanternGenerateOutput",
    "pipeline": "LanternPipeline LanternPipelineOutput embedded_pipeline",
    "processors": "ImageTokensLogitsProcessor RelaxedAcceptanceLogitsProcessor",
    "stats": "DecodingStats",
    "strategy": "lantern_generate",
    "targets": "TargetAdapter register_target",
    "targets.emu3_layout": "Emu3ImageLayout",
    "transformers_pipeline": "LanternTextToImagePipeline",
    "tree": "TREES DraftTree",
    "tree_support": "check_tree_support",
}
_HOME = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}


class _LazyPackage(ModuleType):
    """The package itself, whose exported names win over submodules of the same name.

    Python sets every imported submodule on its package, so that importing `lantern_hf.attach` would put the module in
    the place of the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _HOME:
            value = getattr(value, name)
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the exported names, imported or not."""
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _LazyPackage
register_task()
