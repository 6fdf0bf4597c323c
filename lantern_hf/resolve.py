"""At the door of a generation: check what cannot work, and turn what a user passed into parts that fit the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from lantern_hf.candidates import CandidateTree, LanternCandidateGenerator, RootOnly
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftModel
from lantern_hf.neighbors import NeighborTable
from lantern_hf.relaxation import STRICT, Relaxation
from lantern_hf.sampling import Draws
from lantern_hf.targets import TargetAdapter


def check_generation(model: PreTrainedModel, config: GenerationConfig) -> None:
    """Refuse generation settings that tree decoding cannot honour.

    Raises:
        ValueError: Beams, another assisted mode, or attention maps.
    """
    if (config.num_beams or 1) > 1:
        raise ValueError(f"`num_beams` must be 1 with LANTERN, got {config.num_beams}. Use sampling or greedy decoding.")
    if config.return_dict_in_generate and config.output_attentions:
        raise ValueError(
            "`output_attentions=True` is not served: the attention of a tree pass is over candidates, not over the sequence. Leave "
            "it out, or decode without `assistant`."
        )
    if config.prompt_lookup_num_tokens or config.assistant_early_exit:
        raise ValueError(
            "`prompt_lookup_num_tokens` and `assistant_early_exit` are other kinds of drafting. Unset them, or decode without "
            "`assistant`."
        )


def load_head(name: str | Path, model: PreTrainedModel, **kwargs: Any) -> LanternDraftModel:
    """Load a draft head next to a target's last layer, in its dtype, and bind it.

    Args:
        name: Local folder or Hub id.
        model: The target.
        **kwargs: For `LanternDraftModel.from_pretrained`, such as `revision`, `token`, `dtype`.

    Raises:
        OSError: There is no such head.
        ValueError: It does not fit the target.
    """
    head = LanternDraftModel.from_pretrained(str(name), **kwargs)
    return head.place(model, dtype=kwargs.get("dtype")).bind(model)


def make_generator(
    assistant: LanternDraftModel | CandidateTree | str | None,
    lantern_config: LanternConfig | Mapping[str, Any] | None,
    model: PreTrainedModel,
    adapter: TargetAdapter,
    processors: LogitsProcessorList,
    scale: float | None,
    do_sample: bool,
    draws: Draws,
) -> tuple[CandidateTree, LanternConfig]:
    """Turn `assistant=` into a candidate generator, and settle the configuration.

    Raises:
        TypeError: `assistant` is nothing that drafts.
        ValueError: The head does not fit, or the configuration is out of range.
    """
    if assistant is None:
        columns = adapter.vocab_size if adapter.columns is None else len(adapter.columns)
        return RootOnly(adapter.num_codes or columns), LanternConfig.strict()
    if isinstance(assistant, str | Path):
        assistant = load_head(assistant, model)
    if isinstance(assistant, CandidateTree):
        return assistant, LanternConfig.resolve(lantern_config)
    if not isinstance(assistant, LanternDraftModel):
        raise TypeError(
            f"`assistant` must be a LanternDraftModel, a folder or Hub id of one, or a CandidateTree, got {type(assistant).__name__}. "
            "For another transformers model use `assistant_model=` without lantern_hf."
        )
    if lantern_config is None:
        lantern_config = assistant.config.lantern_config
    config = LanternConfig.resolve(lantern_config)
    generator = LanternCandidateGenerator(
        assistant,
        model,
        config.draft_tree,
        logits_processor=processors,
        guidance_scale=scale,
        do_sample=do_sample,
        draws=draws,
        adapter=adapter,
    )
    return generator, config


def resolve_neighbors(
    config: LanternConfig,
    given: NeighborTable | None,
    candidates: CandidateTree,
    adapter: TargetAdapter,
    device: torch.device,
) -> tuple[Relaxation, NeighborTable | None]:
    """Find the neighbour table that a relaxed configuration needs.

    Args:
        config: Settings of the call.
        given: The table the user passed.
        candidates: What drafts; a head may bring its own table.
        adapter: The target's adapter.
        device: Where the table is needed.

    Returns:
        The relaxation in force (strict where nothing is a code) and the table, or None when strict.

    Raises:
        ValueError: Relaxed on a text model, no table to be had, or one for another codebook.
    """
    if config.is_strict or isinstance(candidates, RootOnly):
        return STRICT, None
    if not adapter.has_codebook:
        raise ValueError(
            f"Relaxed acceptance needs a codebook, and {type(adapter.model).__name__} is a text model without one. Pass "
            "lantern_config=LanternConfig.strict()."
        )
    if adapter.num_codes == 0:  # this prompt asks for text
        return STRICT, None
    head = getattr(candidates, "assistant", None)
    table = given or (None if head is None else head.neighbors)
    codebook = adapter.codebook()
    if table is None and codebook is not None:
        table = NeighborTable.from_codebook(codebook.detach().float(), config.neighborhood_size)
        if head is not None:
            head.neighbors = table
    if table is None:
        raise ValueError(
            f"`neighborhood_size={config.neighborhood_size}` needs a neighbor table, and neither the head nor the target holds one. "
            "Pass neighbors=NeighborTable.from_codebook(vq.quantize.embedding.weight, k), or LanternConfig.strict()."
        )
    if table.num_codes != adapter.num_codes:
        raise ValueError(
            f"The neighbor table is for a codebook of {table.num_codes} entries, the target has {adapter.num_codes}. Build one with "
            "NeighborTable.from_codebook from the VQ model that belongs to this target."
        )
    config.relaxation.check_table(table.k)
    return config.relaxation, table.to(device)
