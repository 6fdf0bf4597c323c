"""The model a head is trained for, as the command line names it: folder or Hub id of a pipeline or of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as _READERS,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import cached_file

from lantern_hf.cli.setup import load_pipeline
from lantern_hf.models import llamagen  # noqa: F401  registers LlamaGen with transformers' Auto classes
from lantern_hf.pipeline import LanternPipeline
from lantern_hf.targets import adapter_for
from lantern_hf.training import Conditioner, PipelineConditioner, ProcessorConditioner

_INDEX = "model_index.json"


@dataclass(frozen=True)
class LoadedTarget:
    """A target with what speaks for it.

    Attributes:
        target: The target.
        conditioner: Turns prompts and images into what it reads; None when the model has no processor.
        pipe: The pipeline it came in, or None.
    """

    target: PreTrainedModel
    conditioner: Conditioner | None
    pipe: LanternPipeline | None


def load_target(
    model: str | None,
    dtype: torch.dtype,
    device: torch.device,
    device_map: str | None,
    size: tuple[int | None, int | None] = (None, None),
) -> LoadedTarget:
    """Load a target.

    Args:
        model: Folder or Hub id of a pipeline or a transformers model; None is the embedded model.
        dtype: Dtype of the target.
        device: Where it goes without a device map.
        device_map: accelerate's placement of a transformers model, such as `"auto"`.
        size: Height and width in pixels of its images; None is the family's own.

    Raises:
        ValueError: The model cannot be loaded, or a pipeline was to be spread by a device map.
    """
    sides: dict[str, Any] = dict(zip(("height", "width"), size, strict=True))
    if model is None or _is_pipeline(model):
        if device_map is not None:
            raise ValueError("--device-map spreads transformers models; a pipeline goes to one --device. Leave it out.")
        pipe = load_pipeline(model, dtype).to(device)
        return LoadedTarget(pipe.transformer, PipelineConditioner(pipe, **sides), pipe)
    try:
        config = AutoConfig.from_pretrained(model)
        architecture = (config.architectures or [""])[0]  # which may be a name of the publisher's own
        read = AutoModelForImageTextToText if type(config) in _READERS else AutoModelForCausalLM
        loader: Any = getattr(transformers, architecture, read)
        target = loader.from_pretrained(model, dtype=dtype, device_map=device_map).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model!r} cannot be loaded: {error}") from error
    if device_map is None:
        target.to(device)
    processor = _processor(model)
    speaks = processor is not None or adapter_for(target).asks == "class_labels"
    return LoadedTarget(target, ProcessorConditioner(target, processor, **sides) if speaks else None, None)


def _is_pipeline(model: str) -> bool:
    """Whether a folder or Hub id holds a pipeline."""
    path = Path(model).expanduser()
    if path.exists():
        return (path / _INDEX).is_file() or not (path / "config.json").is_file()
    if path.is_absolute() or model.startswith(".") or model.count("/") != 1:
        return True  # `load_pipeline` says that it does not exist
    try:
        return cached_file(model, _INDEX, _raise_exceptions_for_missing_entries=False) is not None
    except OSError as error:
        raise ValueError(f"--model {model!r} cannot be loaded: {error}") from error


def _processor(model: str) -> Any:
    """The model's processor, or its tokenizer where no processor is whole; None when it has neither."""
    for kind in (AutoProcessor, AutoTokenizer):
        try:
            processor = kind.from_pretrained(model)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        # Of a folder without one, transformers makes an empty tokenizer.
        if getattr(getattr(processor, "tokenizer", processor), "vocab_size", 0):
            return processor
    return None
