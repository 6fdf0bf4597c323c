"""Puts a LlamaGen, its VQ model, a draft head and a text encoder into the folder of a `LanternPipeline`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.vq_model import VQModel
from transformers import AutoTokenizer, T5EncoderModel

from lantern_hf.convert.api import convert_into, make_options
from lantern_hf.convert.checkpoint import read_json
from lantern_hf.convert.folders import check_free, new_folder
from lantern_hf.convert.report import ConversionReport
from lantern_hf.convert.sources import open_source
from lantern_hf.draft import LanternDraftConfig, LanternDraftModel
from lantern_hf.models.configuration_llamagen import LlamaGenConfig
from lantern_hf.models.llamagen import LlamaGenForConditionalGeneration
from lantern_hf.pipeline import LanternPipeline

__all__ = ["convert_pipeline"]

_KINDS = {"transformer": "llamagen", "vq_model": "llamagen-vq", "draft_head": "head"}
_CONVERTED = (LlamaGenForConditionalGeneration.__name__, LanternDraftModel.__name__, VQModel.__name__)


def convert_pipeline(
    source: str | Path,
    out: str | Path,
    *,
    vq: str | Path,
    head: str | Path | None = None,
    text_encoder: str | Path | None = None,
    dtype: torch.dtype | None = None,
    verify: bool = False,
    grid: int | tuple[int, int] | None = None,
    prefix_length: int | None = None,
    num_attention_heads: int | None = None,
    guidance_scale: float = 7.5,
    top_k: int = 0,
    max_shard_size: int | str = "5GB",
    progress: bool = False,
) -> list[ConversionReport]:
    """Convert a LlamaGen and its companions into the folder of a `LanternPipeline`.

    Each part may also be a folder that was converted before, which is copied.

    Args:
        source: The LlamaGen target, as in `convert`.
        out: Folder to make; it must not exist, or be empty.
        vq: Its VQ model (`vq_ds16_t2i.pt`).
        head: Its draft head; without one the pipeline decodes plainly.
        text_encoder: Folder or Hub id of its T5 encoder and tokenizer (`google/flan-t5-xl`), loaded and saved in full.
            Without one, pass `text_encoder=` and `tokenizer=` to `LanternPipeline.from_pretrained`.
        dtype: Floating dtype of the results; each source's by default.
        verify: As in `convert`, for each part.
        grid: As in `convert`.
        prefix_length: As in `convert`.
        num_attention_heads: As in `convert`, for the target.
        guidance_scale: Default guidance scale of the pipeline.
        top_k: Default `top_k` of the pipeline; 0 is all codes.
        max_shard_size: As in `convert`.
        progress: As in `convert`.

    Returns:
        A report of each part that was converted.

    Raises:
        FileNotFoundError: A source does not exist.
        FileExistsError: Something is at `out`.
        ValueError: As in `convert`, or the parts do not fit one another. Nothing is at `out` then.
    """
    out = Path(out).expanduser()
    check_free(out)
    sources = {"transformer": source, "vq_model": vq} | ({} if head is None else {"draft_head": head})
    common: dict[str, Any] = {"dtype": dtype, "verify": verify, "max_shard_size": max_shard_size, "progress": progress}
    reports = []
    with new_folder(out) as folder:
        for part, name in sources.items():
            options = make_options(grid, prefix_length, num_attention_heads)
            if part == "draft_head":
                options = make_options(target=folder / "transformer")
            if not _copy(name, folder / part):
                with open_source(name) as checkpoint:
                    reports.append(convert_into(folder / part, checkpoint, _KINDS[part], options, **common))
                reports[-1].out = out / part
        _write_index(folder, text_encoder, dtype, guidance_scale, top_k)
    return reports


def _copy(name: str | Path, part: Path) -> bool:
    """Copy a folder that is converted already; tell whether it was one."""
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json")
    if (config.get("architectures") or [config.get("_class_name")])[0] not in _CONVERTED:
        return False
    shutil.copytree(folder, part)
    return True


def _write_index(
    folder: Path, text_encoder: str | Path | None, dtype: torch.dtype | None, guidance_scale: float, top_k: int
) -> None:
    """Save the text parts, and the index, by a pipeline whose large parts have no numbers: it checks that all fit."""
    encoder = tokenizer = None
    if text_encoder is not None:
        encoder = T5EncoderModel.from_pretrained(text_encoder, dtype=dtype or "auto")
        tokenizer = AutoTokenizer.from_pretrained(text_encoder)
        encoder.save_pretrained(folder / "text_encoder")
        tokenizer.save_pretrained(folder / "tokenizer")
    with torch.device("meta"):
        transformer = LlamaGenForConditionalGeneration(LlamaGenConfig.from_pretrained(folder / "transformer"))
        vq = VQModel.from_config(VQModel.load_config(folder / "vq_model"))
        head = None
        if (folder / "draft_head").is_dir():
            head = LanternDraftModel(LanternDraftConfig.from_pretrained(folder / "draft_head"))
    pipeline = LanternPipeline(transformer, vq, tokenizer, encoder, head, guidance_scale=guidance_scale, top_k=top_k)
    pipeline.save_config(folder)
