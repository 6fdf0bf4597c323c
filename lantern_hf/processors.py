"""Scores of tree nodes: guidance, the user's logits processors with each node's own prefix, and the relaxed processor.

Knows tensors and transformers' processors; no model, tree or cache. Scores live on *columns*: the ids a target may emit
at a position, the codebook's codes first and in order. `columns` maps them to token ids, None stands for the identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from lantern_hf._host import on_device
from lantern_hf._neighborhood import neighborhood
from lantern_hf.neighbors import NeighborTable
from lantern_hf.relaxation import Relaxation
from lantern_hf.sequences import Sequences
from lantern_hf.structure import ImageRules, allow, force

# These look at nothing but the scores, so they run on any set of columns and on all nodes at once.
PREFIX_FREE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.LogitNormalization,
    hf.InfNanRemoveLogitsProcessor,
)
# These run the model or keep state from call to call, which asking about siblings would corrupt.
_STATEFUL = (
    hf.ClassifierFreeGuidanceLogitsProcessor,
    hf.DiaClassifierFreeGuidanceLogitsProcessor,
    hf.SynthIDTextWatermarkLogitsProcessor,
    hf.WhisperTimeStampLogitsProcessor,
)


class Guidance(NamedTuple):
    """What classifier-free guidance needs.

    Attributes:
        scale: Guidance scale, never 1.
        input_ids: Unconditional prompt `(B, S_u)` int64, or None when the user gave none.
        attention_mask: Its mask `(B, S_u)`, or None.
    """

    scale: float
    input_ids: Tensor | None
    attention_mask: Tensor | None


def take_guidance(processors: LogitsProcessorList) -> tuple[Guidance | None, LogitsProcessorList]:
    """Take transformers' guidance processor out of a prepared list.

    It runs the model itself, one token a call, and keeps a cache of its own, which a tree would corrupt silently; only
    its scale and prompt are used.

    Args:
        processors: The list `generate` prepared.

    Returns:
        The guidance, or None when there is none, and the other processors.

    Raises:
        ValueError: A processor that cannot be asked about siblings.
    """
    unbatched = [p for p in processors if isinstance(p, hf.UnbatchedClassifierFreeGuidanceLogitsProcessor)]
    rest = LogitsProcessorList(p for p in processors if p not in unbatched)
    for processor in rest:
        if isinstance(processor, _STATEFUL):
            raise ValueError(
                f"{type(processor).__name__} keeps state between calls, so it cannot score the siblings of a tree. "
                "Remove it, or decode without LANTERN. For guidance pass `guidance_scale=` to generate."
            )
    if not unbatched or unbatched[0].guidance_scale == 1:
        return None, rest
    context: dict[str, Any] = unbatched[0].unconditional_context
    return Guidance(unbatched[0].guidance_scale, context["input_ids"], context["attention_mask"]), rest


def guide(logits: Tensor, scale: float | None) -> Tensor:
    """Apply classifier-free guidance in the form transformers uses, so that scores are the same numbers.

    Args:
        logits: `(2B, ..., C)` with the conditional rows first, or `(B, ..., C)` without guidance.
        scale: Guidance scale, or None.

    Returns:
        `(B, ..., C)` float32: the logits, or `u + scale * (c - u)` on log-probabilities (arXiv 2207.12598).
    """
    if scale is None:
        return logits.float()
    conditional, unconditional = logits.float().log_softmax(-1).chunk(2)
    return scale * (conditional - unconditional) + unconditional


class NodeProcessors:
    """Runs the user's processors on the scores of tree nodes, and keeps to the structure of the target's images.

    Args:
        processors: Prepared processors, guidance taken out.
        vocab_size: Tokens in the target's vocabulary.
        columns: Token id of each column, `(C,)` int64, or None for the identity.
        rules: What may come where in an image. Columns that may not are taken out before the processors run; a forced
            token has all mass after them, so that no processor can break a row of an image.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        vocab_size: int,
        columns: Tensor | None,
        rules: ImageRules | None = None,
    ):
        self._processors = LogitsProcessorList(self._tolerant(processor) for processor in processors)
        self._vocab_size, self._columns, self._rules = vocab_size, columns, rules
        self._asked: set[int] = set()
        self._last_allowed: tuple[list[int], Tensor] | None = None
        self.needs_prefix = any(type(processor) not in PREFIX_FREE for processor in processors)

    def _tolerant(self, processor: Any) -> Any:
        """Make `prefix_allowed_tokens_fn` fit to be asked about nodes.

        It is not asked about rows whose answer is not read. Such a row shows a prefix of another length than its own,
        which a trie, say, may not know; nothing being allowed there would be an error.
        """
        if type(processor) is not hf.PrefixConstrainedLogitsProcessor:
            return processor
        ask, per_prompt = processor._prefix_allowed_tokens_fn, processor._num_beams

        def answer(row: int, ids: Tensor) -> Any:
            return self._as_index(ask(row // per_prompt, ids), ids.device) if row in self._asked else [0]

        return hf.PrefixConstrainedLogitsProcessor(answer, 1)

    def _as_index(self, allowed: Any, device: torch.device) -> Any:
        """Turn a long list of ids into a tensor, and the same one only once: all image tokens are a long list."""
        if type(allowed) is not list or len(allowed) < 256:
            return allowed
        if self._last_allowed is None or self._last_allowed[0] != allowed:
            self._last_allowed = list(allowed), torch.tensor(allowed, device=device)
        return self._last_allowed[1]

    def __call__(
        self, sequences: Sequences, suffix: Tensor | None, logits: Tensor, offset: Tensor | None = None
    ) -> Tensor:
        """Score one node of every row.

        Args:
            sequences: Committed tokens.
            suffix: Tokens on the way from the last committed token to the node, `(B, T)` token ids; may be None unless
                `needs_prefix`.
            logits: Guided logits at the node, `(B, C)` float32.
            offset: Tokens that the node's image has, `(B,)` int64; needed with rules.

        Returns:
            Processed scores, `(B, C)` float32. Those of a row that has ended mean nothing.
        """
        logits = allow(self._rules, offset, logits)
        return force(self._rules, offset, self._process(sequences, suffix, logits))

    def _process(self, sequences: Sequences, suffix: Tensor | None, logits: Tensor) -> Tensor:
        """Run the user's processors on one node of every row, `(B, C)`."""
        if not self.needs_prefix:
            return self._blind(logits)
        assert suffix is not None
        scores = self.expand(logits).to(sequences.device)
        processed = scores
        for rows, ids in sequences.by_length(suffix.to(sequences.device)):
            self._asked = set(rows)
            # Processors may write in place, and every row of a batch is only read for its own length.
            own = self._processors(ids, scores.clone())  # type: ignore[arg-type]
            if len(rows) < sequences.num_rows:
                mine = on_device([[row in self._asked] for row in range(sequences.num_rows)], own.device)
                own = torch.where(mine, own, processed)
            processed = own
        return self._collect(processed, logits.shape[-1]).to(logits.device)

    def _blind(self, logits: Tensor) -> Tensor:
        """Process `(rows, C)` scores with processors that look at nothing else."""
        if not self._processors:
            return logits
        return self._processors(logits.new_zeros(len(logits), 1, dtype=torch.long), logits)  # type: ignore[arg-type]

    def _collect(self, scores: Tensor, count: int) -> Tensor:
        """Take the scores of the columns, `(B, C)`, back out of the vocabulary's."""
        return scores[:, :count] if self._columns is None else scores[:, self._columns.to(scores.device)]

    def nodes(
        self, sequences: Sequences, suffixes: Iterable[Tensor], logits: Tensor, offset: Tensor | None = None
    ) -> Tensor:
        """Score several nodes of every row.

        Args:
            sequences: Committed tokens.
            suffixes: For each of M nodes the tokens on the way to it, `(B, T)` token ids; not looked at unless
                `needs_prefix`.
            logits: Guided logits, `(B, M, C)` float32.
            offset: Tokens that each node's image has, `(B, M)` int64; needed with rules.

        Returns:
            Processed scores, `(B, M, C)` float32.
        """
        logits = allow(self._rules, offset, logits)
        if not self.needs_prefix:
            scores = self._blind(logits.flatten(0, 1)).view_as(logits)
        else:
            each = [self._process(sequences, suffix, logits[:, i]) for i, suffix in enumerate(suffixes)]
            scores = torch.stack(each, dim=1)
        return force(self._rules, offset, scores)

    def expand(self, scores: Tensor) -> Tensor:
        """Spread scores of columns `(B, C)` over the vocabulary `(B, V)`; other ids hold the dtype's minimum."""
        if self._columns is None and scores.shape[-1] == self._vocab_size:
            return scores
        full = scores.new_full((scores.shape[0], self._vocab_size), torch.finfo(scores.dtype).min)
        if self._columns is None:
            full[:, : scores.shape[-1]] = scores
        else:
            full[:, self._columns.to(full.device)] = scores
        return full


class ImageTokensLogitsProcessor(LogitsProcessor):
    """Allows only image tokens, for plain decoding of models that mix text and images in one vocabulary.

    Args:
        image_token_ids: Ids of the image tokens, `(K,)` int64.
    """

    def __init__(self, image_token_ids: Tensor):
        self.image_token_ids = image_token_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `(B, V)` scores with everything but image tokens at minus infinity."""
        ids = self.image_token_ids.to(scores.device)
        return torch.full_like(scores, -torch.inf).index_copy(-1, ids, scores[:, ids])


class RelaxedAcceptanceLogitsProcessor(LogitsProcessor):
    """Moves the probability of a candidate's latent neighbours onto the candidate (LANTERN++, arXiv 2502.06352).

    Half of a pair with `LanternCandidateGenerator`: it takes rows whose last token is a candidate, with the target's
    scores at the candidate's *parent*. Accepting a candidate x with `min(1, p'(x) / q(x))` under the returned p' is the
    relaxed rule.

    Args:
        neighbors: Table over the codebook.
        neighborhood_size: Entries walked.
        lam: Relative cap, at least 1.
        delta: Absolute cap in [0, 1]; not with `lam`.
        image_token_ids: Token id of each code, `(K,)` int64; None when codes are token ids.

    Raises:
        ValueError: A knob is out of range, or the table holds fewer neighbours.
    """

    def __init__(
        self,
        neighbors: NeighborTable,
        neighborhood_size: int = 10,
        lam: float | None = None,
        delta: float | None = None,
        image_token_ids: Tensor | None = None,
    ):
        self.relaxation = Relaxation(neighborhood_size, lam, delta)
        self.relaxation.check_table(neighbors.indices.shape[1])
        self.neighbors, self.image_token_ids = neighbors, image_token_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `(rows, V)` log-probabilities in which each row's last token has its neighbourhood's mass.

        Args:
            input_ids: Sequences ending in a candidate, `(rows, length)` int64.
            scores: The target's processed scores at the candidate's parent, `(rows, V)`.
        """
        probs = scores.float().softmax(-1)
        tokens = input_ids[:, -1]
        ids = self.image_token_ids
        if ids is None:
            return self._move(probs, tokens).log().to(scores.dtype)
        ids = ids.to(scores.device)
        matches = tokens[:, None] == ids
        codes = torch.where(matches.any(1), matches.long().argmax(1), len(ids))  # past the codebook: strict
        moved = self._move(probs[:, ids], codes)
        return probs.index_copy(-1, ids, moved).log().to(scores.dtype)

    def _move(self, probs: Tensor, codes: Tensor) -> Tensor:
        """Move the mass within `(rows, K)` probabilities."""
        neighbors = self.neighbors.to(probs.device)
        inside = codes < probs.shape[-1]
        x = codes.clamp_max(probs.shape[-1] - 1)[:, None]
        own = probs.gather(-1, x)
        near = neighborhood(probs, codes, own.squeeze(-1), neighbors, self.relaxation)
        moved = probs.scatter(-1, torch.where(near.kept, near.ids, x), 0) if near.kept.shape[-1] else probs
        moved = moved.scatter(-1, x, own + near.mass[:, None])
        return torch.where(inside[:, None], moved, probs)
