"""At the door of a generation: check what cannot work, and turn what a user passed into parts that fit the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from lantern_hf._checkpointing import check_checkpointing
from lantern_hf.candidates import CandidateTree, LanternCandidateGenerator, RootOnly
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftModel
from lantern_hf.head_files import WEIGHTS_FILE
from lantern_hf.neighbor_cache import cached_neighbors
from lantern_hf.neighbors import NeighborTable
from lantern_hf.relaxation import STRICT, Relaxation
from lantern_hf.sampling import Draws
from lantern_hf.targets import TargetAdapter


def check_generation(model: PreTrainedModel, config: GenerationConfig) -> None:
    """Refuse generation settings that tree decoding cannot honour.

    Raises:
        ValueError: Beams, another assisted mode, attention maps, a prompt that another library rewrites, or a model
            that drops its cache.
    """
    check_checkpointing(model)
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"`num_beams` must be 1 with LANTERN, got {config.num_beams}. Use sampling or greedy decoding."
        )
    if config.return_dict_in_generate and config.output_attentions:
        raise ValueError(
            "`output_attentions=True` is not served: the attention of a tree pass is over candidates, not over the "
            "sequence. Leave it out, or decode without LANTERN."
        )
    prepare = model.__dict__.get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__self__", None) is not model:
        raise ValueError(
            f"`prepare_inputs_for_generation` of this {type(model).__name__} was replaced on the instance, as PEFT "
            "does for prompt tuning, so that the target would read another prompt than the draft head. Decode without "
            "LANTERN."
        )
    if config.prompt_lookup_num_tokens or config.assistant_early_exit:
        raise ValueError(
            "`prompt_lookup_num_tokens` and `assistant_early_exit` are other kinds of drafting. Unset them, or decode "
            "without LANTERN."
        )


def pad_token(config: GenerationConfig) -> int:
    """Give the id that fills rows which end early."""
    prepared = getattr(config, "_pad_token_tensor", None)
    if prepared is not None:
        return int(prepared.flatten()[0])
    return 0 if config.pad_token_id is None else int(config.pad_token_id)


def load_head(name: str | Path, model: PreTrainedModel, **kwargs: Any) -> LanternDraftModel:
    """Load a draft head next to a target's last layer, in its dtype, unless told otherwise, and bind it.

    Args:
        name: Local folder or Hub id; `user/name@revision` names a branch, a tag or a commit.
        model: The target.
        **kwargs: For `LanternDraftModel.from_pretrained`, such as `revision`, `token`, `dtype`,
            `device_map`.

    Raises:
        OSError: There is no such head.
        ValueError: It does not fit the target.
    """
    path, revision = str(name), kwargs.pop("revision", None)
    if not Path(path).is_dir() and "@" in path:
        path, _, at = path.partition("@")
        if revision not in (None, at):
            raise ValueError(f"{str(name)!r} names another revision than `revision={revision!r}`. Leave one out.")
        revision = at
    head = LanternDraftModel.from_pretrained(path, revision=revision, **kwargs)
    device = None if kwargs.get("device_map") is None else head.device
    return head.place(model, dtype=kwargs.get("dtype"), device=device).bind(model)


# Heads loaded by name for a target; loading takes seconds, and the next call asks for the same one.
_HEADS: WeakKeyDictionary[PreTrainedModel, dict[Any, LanternDraftModel]] = WeakKeyDictionary()


def head_for(name: str | Path, model: PreTrainedModel, **kwargs: Any) -> LanternDraftModel:
    """Give the head of that name for a target, loaded when it is first asked for; arguments as `load_head`.

    A head in a folder is loaded again when its weights have changed.
    """
    loaded = _HEADS.setdefault(model, {})
    weights = Path(name, WEIGHTS_FILE)
    stamp = weights.stat().st_mtime_ns if weights.is_file() else None
    asked = sorted((key, str(value)) for key, value in kwargs.items() if key not in ("token", "force_download"))
    key = (str(name), stamp, tuple(asked))
    if key not in loaded or kwargs.get("force_download"):
        loaded[key] = load_head(name, model, **kwargs)
    head = loaded[key]
    device = None if kwargs.get("device_map") is None else head.device
    return head.place(model, dtype=kwargs.get("dtype"), device=device)  # the target may have moved since


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
        return RootOnly(adapter.num_columns), LanternConfig.strict()
    if isinstance(assistant, str | Path):
        assistant = head_for(assistant, model)
    if isinstance(assistant, CandidateTree):
        return assistant, LanternConfig.resolve(lantern_config)
    if not isinstance(assistant, LanternDraftModel):
        raise TypeError(
            "`assistant` must be a LanternDraftModel, a folder or Hub id of one, or a CandidateTree, got "
            f"{type(assistant).__name__}. For another transformers model use `assistant_model=` without lantern_hf."
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
    check_relaxation(config, given, adapter)
    if adapter.num_codes == 0:  # this prompt asks for text
        return STRICT, None
    head = getattr(candidates, "assistant", None)
    own = None if head is None or head.neighbors is None else check_table(head.neighbors, adapter)
    table = given or own
    if table is None or (given is None and table.k < config.neighborhood_size):
        table = _table_of(adapter, config.neighborhood_size) or own
    if table is None:
        raise ValueError(
            f"`neighborhood_size={config.neighborhood_size}` needs a neighbor table, and neither the head nor the "
            "target holds one. Pass neighbors=NeighborTable.from_codebook(vq.quantize.embedding.weight, k), or "
            "lantern_config=LanternConfig.strict()."
        )
    config.relaxation.check_table(table.k)
    return config.relaxation, table.to(device)


def check_relaxation(config: LanternConfig, given: NeighborTable | None, adapter: TargetAdapter) -> None:
    """Refuse a relaxed configuration on a text model, and a user's table that does not fit.

    Raises:
        ValueError: The target has no codebook, or the table is for another one.
    """
    if not config.is_strict and not adapter.has_codebook:
        raise ValueError(
            f"Relaxed acceptance needs a codebook, and {type(adapter.model).__name__} is a text model without one. "
            "Pass lantern_config=LanternConfig.strict()."
        )
    if given is not None:
        check_table(given, adapter)


def check_table(table: NeighborTable, adapter: TargetAdapter) -> NeighborTable:
    """Refuse a neighbour table over a codebook of another size.

    Raises:
        ValueError: The sizes differ.
    """
    if table.num_codes != adapter.codebook_size:
        raise ValueError(
            f"The neighbor table is for a codebook of {table.num_codes} entries, the target has "
            f"{adapter.codebook_size}. Build one with NeighborTable.from_codebook from the VQ model of this target."
        )
    return table


# Tables over a target's own codebook, which outlive the call that first needed them.
_TABLES: WeakKeyDictionary[PreTrainedModel, NeighborTable] = WeakKeyDictionary()


def _table_of(adapter: TargetAdapter, size: int) -> NeighborTable | None:
    """The table over the codebook that the target itself holds, None when it holds none."""
    table = _TABLES.get(adapter.model)
    if table is not None and table.k >= size:
        return table
    codebook = adapter.codebook()
    if codebook is None or codebook.is_meta:
        return None
    table = _TABLES[adapter.model] = cached_neighbors(codebook.detach().float(), size, adapter.codebook_metric)
    return table
