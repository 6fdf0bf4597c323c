"""`lantern_generate`: draft a tree, score it in one pass of the target, accept a path, commit it.

The loop behind `model.generate`. It composes the parts and knows none of their insides: which family the target is of
is the adapter's business, what drafts is the generator's, what is accepted is `acceptance.py`'s, how a cache keeps a
path is `cache.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lantern_hf._placement import wake
from lantern_hf.candidates import CandidateTree
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftModel
from lantern_hf.neighbors import NeighborTable
from lantern_hf.outputs import LanternGenerateOutput
from lantern_hf.session import Session
from lantern_hf.targets.attention import tree_attention

__all__ = ["lantern_generate"]


@torch.no_grad()
def lantern_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    assistant: LanternDraftModel | CandidateTree | str | None = None,
    lantern_config: LanternConfig | Mapping[str, Any] | None = None,
    neighbors: NeighborTable | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    lantern_streamer: BaseStreamer | None = None,
    on_round: Any = None,
    target_options: Mapping[str, Any] | None = None,
    **model_kwargs: Any,
) -> LanternGenerateOutput | Tensor:
    """Generate with LANTERN++; meant for `model.generate(..., custom_generate=lantern_hf.lantern_generate)`.

    Args:
        model: The target.
        input_ids: Prompts, `(B, S)` int64.
        logits_processor: Processors as `generate` prepares them. Guidance is taken over, the others run on every node.
        stopping_criteria: Criteria as `generate` prepares them; the first hit ends a row exactly there.
        generation_config: Settings as `generate` prepares them.
        assistant: Draft head, its local folder or Hub id, or any `CandidateTree`. None decodes plainly, one token a
            pass, with guidance in one batch.
        lantern_config: Tree and acceptance rule. Default: the head's own, or LANTERN++ with 10 neighbours and `lam=2`.
        neighbors: Neighbour table. Default: the head's, or one made from a codebook that the target holds.
        generator: Source of every draw, or one per row. Default: the global one.
        lantern_streamer: Receives the prompt and then one `(B,)` column a token. (`generate` keeps `streamer=` to
            itself when it is given a callable; an attached model passes it on.)
        on_round: Called with the decoding state after every round, as `on_round(session)`; for progress bars.
        target_options: Options of the target's adapter, such as `{"interleaved": True}` for Anole; `"family"` names
            the adapter itself, where a model alone does not tell.
        **model_kwargs: What `generate` passes to the model.

    Returns:
        Sequences `(B, S + new)` int64, or `LanternGenerateOutput` with `return_dict_in_generate`.

    Raises:
        ValueError: Something that cannot work: beams, an encoder-decoder, a cache that keeps no path, a head, table or
            tree that does not fit. Nothing has run by then.
    """
    wake(model)
    session = Session(
        model,
        input_ids,
        LogitsProcessorList() if logits_processor is None else logits_processor,
        StoppingCriteriaList() if stopping_criteria is None else stopping_criteria,
        model.generation_config if generation_config is None else generation_config,
        assistant=assistant,
        lantern_config=lantern_config,
        neighbors=neighbors,
        generator=generator,
        streamer=lantern_streamer,
        target_options=target_options,
        model_kwargs=model_kwargs,
    )
    with tree_attention(model) as attention, session.stats.timer("total"):
        session.prefill()
        while not session.finished:
            with session.stats.timer("draft"):
                session.draft()
            with session.stats.timer("verify"):
                session.score(attention)
            with session.stats.timer("accept"):
                session.commit(session.accept())
            if on_round is not None:
                on_round(session)
    return session.result()
