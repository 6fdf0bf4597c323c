"""Makes transformers know the task `lantern-text-to-image`, without importing transformers.

If transformers' pipelines are loaded already, the task is entered at once; otherwise as soon as they are.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

TASK = "lantern-text-to-image"
_PIPELINES = "transformers.pipelines"
_HOME, _CLASS = "lantern_hf.transformers_pipeline", "LanternTextToImagePipeline"


class _WhenLoaded(MetaPathFinder):
    """Watches for the import of transformers' pipelines, and leaves finding and loading to others."""

    _asking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Give the usual spec of that one module, whose execution is followed by the registration."""
        if name != _PIPELINES or self._asking:
            return None
        self._asking = True
        try:
            spec = find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _enter(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_task() -> None:
    """Let `transformers.pipeline` make pipelines of our task."""
    pipelines = sys.modules.get(_PIPELINES)
    if pipelines is not None:
        _enter(pipelines)
    elif not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenLoaded())


class _Task(dict[str, Any]):
    """A task whose class is imported when it is first asked for, also where transformers resolves no names itself."""

    def __getitem__(self, key: str) -> Any:
        return getattr(importlib.import_module(_HOME), _CLASS) if key == "impl" else super().__getitem__(key)


def _enter(pipelines: Any) -> None:
    """Enter the task as transformers enters its own."""
    pipelines.PIPELINE_REGISTRY.supported_tasks[TASK] = _Task(
        impl=f"{_HOME}.{_CLASS}",
        pt=(pipelines.AutoModelForImageTextToText, pipelines.AutoModelForCausalLM),
        type="multimodal",
    )
