"""Candidate generators: what proposes the tokens of a tree.

The decoding loop knows a generator only by `CandidateTree`: it brings its tree, its tokens and its scores (whose
softmax is the q they were drawn from), and may ask to see the target's. `LanternCandidateGenerator` grows a static tree
with a draft head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import logging

from lantern_hf._host import on_device
from lantern_hf._placement import execution_device, last_layer_device
from lantern_hf.cache import RaggedCache, new_dynamic_cache
from lantern_hf.draft import POSITION_OFFSET, LanternDraftModel
from lantern_hf.processors import NodeProcessors, guide
from lantern_hf.sampling import Draws
from lantern_hf.sequences import Sequences
from lantern_hf.targets import TargetAdapter, adapter_for
from lantern_hf.tree import DraftTree, get_tree

logger = logging.get_logger(__name__)

_EXCLUDED = torch.finfo(torch.float32).min / 1e3
"""Scores up to this are those of excluded tokens: minus infinity, or the dtype's minimum after some arithmetic."""


class CandidateTree(CandidateGenerator):
    """A candidate generator that proposes a tree: the seam between the decoding loop and whatever drafts.

    A subclass sets `tree` and implements `get_candidates`. `tree.rows[n]` names the row of the returned scores that
    node n's token was drawn from; siblings that share a row must be drawn without replacement, in rank order.

    Attributes:
        tree: Shape of every proposal.
        requires_target_scores: Whether `update_candidate_strategy` wants the processed target scores of every node.
    """

    requires_model_outputs = True
    requires_target_scores = False
    tree: DraftTree

    def update_candidate_strategy(  # type: ignore[override]
        self, input_ids: Tensor, scores: Tensor | None, num_matches: Tensor, path: Tensor | None = None
    ) -> None:
        """Learn what became of a proposal; nothing by default.

        Args:
            input_ids: Sequences the proposal continued, rows aligned on the right, `(B, S + 1)`.
            scores: Processed target scores of every node, `(B, N, C)`; None unless `requires_target_scores`.
            num_matches: Drafted tokens accepted, `(B,)` int64.
            path: Node ids of the accepted path, `(B, D + 1)`, padded with -1.
        """


class _Level(NamedTuple):
    """One pass of the head: the inner nodes at one depth."""

    nodes: Tensor  # (I_d,) node ids
    parents: Tensor  # (I_d,) place of each node's parent in the level above
    mask: Tensor  # (I_d, inner nodes so far) bool, the root's entry left out: it is committed
    children: Tensor  # node ids of the children, one level down
    drawn: Tensor  # place of each child among the level's draws, flattened from (I_d, R_d)
    width: int  # R_d, the most children
    paths: tuple[Tensor, ...]  # nodes on the way to each, the root left out

    def to(self, device: torch.device) -> _Level:
        """Move the index tables."""
        paths = tuple(path.to(device) for path in self.paths)
        moved: dict[str, Any] = {name: x.to(device) for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(paths=paths, **moved)


@lru_cache(maxsize=32)
def _plan(tree: DraftTree) -> tuple[DraftTree, tuple[_Level, ...]]:
    """Lay out how a head grows a tree: scores of inner nodes in node order, one pass of the head per depth."""
    inner = tree.inner.tolist()
    place = {node: index for index, node in enumerate(inner)}
    parents = tree.parents.tolist()
    rows = [place.get(parent, 0) for parent in parents]
    levels: list[_Level] = []
    for depth, width in enumerate(tree.widths):
        nodes = [node for node in inner if len(tree.choices[node - 1] if node else ()) == depth]
        above = levels[-1].nodes.tolist() if levels else []
        so_far = [node for node in inner if node and tree.depths[node] <= depth]
        lines = [[bool(tree.mask[node, other]) for other in so_far] for node in nodes]
        paths = tuple(tree.mask[node].nonzero().flatten()[1:] for node in nodes)
        children = tree.children[nodes, :width].flatten()
        present = (children >= 0).nonzero().flatten()
        levels.append(
            _Level(
                torch.tensor(nodes),
                torch.tensor([above.index(parents[node]) if node else 0 for node in nodes]),
                torch.tensor(lines, dtype=torch.bool).view(len(nodes), len(so_far)),
                children[present],
                present,
                width,
                paths,
            )
        )
    return DraftTree.from_choices(tree.choices, rows=rows), tuple(levels)


class LanternCandidateGenerator(CandidateTree):
    """Grows a static tree with a draft head, one pass of the head per depth.

    Args:
        assistant: The head, bound to its target.
        model: The target.
        tree: Preset name, choices or tree.
        logits_processor: Processors that shape q as they shape p; without transformers' guidance processor.
        guidance_scale: Classifier-free guidance of q; the streams then come as `(2B, ...)`, conditional rows first.
        do_sample: Draw children without replacement; otherwise take the most probable.
        draws: Source of randomness; the global generator when absent.
        adapter: The target's adapter, when the caller has one.

    Raises:
        ValueError: The head does not fit the target.
    """

    def __init__(
        self,
        assistant: LanternDraftModel,
        model: Any,
        tree: str | DraftTree | Sequence[Sequence[int]] = "eagle_25",
        *,
        logits_processor: LogitsProcessorList | None = None,
        guidance_scale: float | None = None,
        do_sample: bool = True,
        draws: Draws | None = None,
        adapter: TargetAdapter | None = None,
    ):
        if assistant.target is not model:
            assistant.bind(model)
        self.assistant, self.adapter = assistant, adapter or adapter_for(model)
        self.tree, levels = _plan(get_tree(tree))
        self._device = execution_device(assistant)
        _check_place(self._device, last_layer_device(model))
        self._levels = [level.to(self._device) for level in levels]
        self._processors = NodeProcessors(
            LogitsProcessorList() if logits_processor is None else logits_processor,
            self.adapter.vocab_size,
            self.adapter.columns,
            self.adapter,
        )
        self._scale, self._do_sample, self._draws = guidance_scale, do_sample, draws
        self._cache: RaggedCache | None = None

    def get_candidates(  # type: ignore[override]
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = True,
        n_last_matches: Sequence[int] | int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Draft a tree below the last token of each row.

        Args:
            input_ids: Sequences, rows aligned on the right, `(B, S + 1)` int64; the last token is the root, which the
                target has not read yet.
            model_kwargs: `position_ids` `(R, A)` of the tokens the target has read since the last call (the whole
                prompt on the first); on the first call also, optionally, `attention_mask` `(R, S)`, `prompt_embeds`
                `(R, S, H)`, and always optional `sequences`, the rows as `Sequences`, and `image_offset` `(B,)`, the
                tokens that the image of each row has, root included. R is B, or 2B under guidance.
            model_outputs: `hidden_states[-1]` holds the target's states of those tokens, `(R, A, H)`.
            is_first_iteration: Whether a new prompt starts.
            n_last_matches: Drafted tokens of each row that were accepted last time; A is their maximum + 1.

        Returns:
            Candidate ids `(B, S + N)`: the sequences without their root, then the nodes in order. Processed scores of
            the inner nodes in node order, `(B, I, C)`; their softmax is the q of `tree.rows`.

        Raises:
            ValueError: The target's states are missing.
        """
        if getattr(model_outputs, "hidden_states", None) is None:
            raise ValueError(
                "`model_outputs.hidden_states` is missing. Run the target with `output_hidden_states=True`."
            )
        model_kwargs = model_kwargs or {}
        hidden = model_outputs.hidden_states[-1]
        sequences = model_kwargs.get("sequences") or Sequences(input_ids, 0)
        draws = self._draws or Draws(None, len(input_ids), self._device)
        counts = [hidden.shape[1]] * len(hidden) if is_first_iteration else _counts(n_last_matches, len(hidden))
        features, positions = self._read(input_ids, hidden, counts, model_kwargs, is_first_iteration)
        offset = model_kwargs.get("image_offset")
        if offset is None:
            offset = self.adapter.start(input_ids)
        columns, scores = self._grow(sequences, features, positions, offset.to(self._device), draws)
        candidates = self.adapter.token_ids(columns[:, 1:])
        return torch.cat([input_ids, candidates.to(input_ids.device)], dim=1), scores

    def _read(
        self, input_ids: Tensor, hidden: Tensor, counts: list[int], model_kwargs: dict[str, Any], first: bool
    ) -> tuple[Tensor, Tensor]:
        """Let the head read what was committed; give its output at the root `(R, H)` and the root's position `(R,)`."""
        rows, width, _ = hidden.shape
        self._target_dtype = hidden.dtype
        first_column = input_ids.shape[1] - on_device(counts, input_ids.device)[:, None]
        # Entry j of a row holds the token after its j-th new state. Past the row's count, and before its first token
        # where the unconditional prompt is the longer one, anything will do.
        index = (first_column + torch.arange(width, device=input_ids.device)).clamp(0, input_ids.shape[1] - 1)
        streams = input_ids.repeat(rows // len(input_ids), 1)
        tokens, positions = streams.gather(1, index), model_kwargs["position_ids"] + POSITION_OFFSET
        prompt = model_kwargs.get("prompt_embeds") if first else None
        if prompt is None:
            embeds = self.adapter.embed(tokens, positions)
        else:
            root = self.adapter.embed(tokens[:, -1:], positions[:, -1:])
            embeds = torch.cat([prompt[:, 1:], root.to(prompt.device)], dim=1)
        if first:
            mask = model_kwargs.get("attention_mask")
            padding = None if mask is None else ~mask.bool()
            self._cache = RaggedCache(new_dynamic_cache(self.assistant.config), rows, self._device, padding=padding)
        assert self._cache is not None
        mask = self._entry_mask(counts, width, model_kwargs.get("attention_mask") if first else None)
        output = self._head(embeds, hidden, positions, self._cache.tree_mask(mask))
        self._cache.keep(torch.arange(width, device=self._device)[None], counts)
        ends = on_device(counts, self._device) - 1
        every = torch.arange(rows, device=self._device)
        return output[every, ends], positions.to(self._device)[every, ends]

    def _entry_mask(self, counts: list[int], width: int, prompt_mask: Tensor | None) -> Tensor:
        """Causal mask of the new entries, `(A, A)`, or `(R, A, A)` when some rows have fewer or padding."""
        causal = torch.ones(width, width, dtype=torch.bool, device=self._device).tril()
        if prompt_mask is not None and not bool(prompt_mask.all()):
            # Padding sees itself: a row that attends to nothing is NaN, and would spoil whatever reads it next.
            own = torch.eye(width, dtype=torch.bool, device=self._device)
            return (causal & prompt_mask.bool().to(self._device)[:, None]) | own
        if len(set(counts)) == 1:
            return causal
        filled = torch.arange(width, device=self._device) < on_device(counts, self._device)[:, None]
        return causal & filled[:, None]

    def _head(self, embeds: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Run the head behind its cache, `(R, A, H)`."""
        assert self._cache is not None
        device = self._device
        output = self.assistant(
            embeds.to(device), hidden.to(device), positions.to(device), attention_mask=mask, cache=self._cache.cache
        )
        return output.last_hidden_state

    def _grow(
        self, sequences: Sequences, features: Tensor, positions: Tensor, offset: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor]:
        """Draw the nodes level by level: columns of all nodes `(B, N)` and scores of the inner ones `(B, I, C)`."""
        batch = sequences.num_rows
        columns = torch.zeros(batch, self.tree.num_nodes, dtype=torch.long, device=self._device)
        level_features, offsets = features[:, None], offset[:, None]
        all_scores: list[Tensor] = []
        for depth, level in enumerate(self._levels):
            if depth:
                level_features = self._descend(level, columns, level_features, positions + depth)
                offsets = self.adapter.advance(
                    offsets[:, level.parents], self.adapter.token_ids(columns[:, level.nodes])
                )
            logits = self.adapter.logits(level_features.to(self._target_dtype)).to(self._device)
            logits = guide(logits, self._scale)
            suffixes = (self.adapter.token_ids(columns[:, path]) for path in level.paths)
            scores = self._processors.nodes(sequences, suffixes, logits, offsets)
            drawn = self._draw(scores.float(), level.width, draws)
            columns[:, level.children] = drawn.flatten(1)[:, level.drawn]
            all_scores.append(scores)
        assert self._cache is not None
        self._cache.drop_new()
        return columns, torch.cat(all_scores, dim=1)

    def _descend(self, level: _Level, columns: Tensor, above: Tensor, positions: Tensor) -> Tensor:
        """Run the head over the inner nodes of one depth, `(R, I_d, H)`."""
        assert self._cache is not None
        token_ids = self.adapter.token_ids(columns[:, level.nodes])
        streams = token_ids.repeat(len(above) // len(columns), 1)
        places = positions[:, None].expand(-1, len(level.nodes))
        mask = self._cache.tree_mask(level.mask)
        return self._head(self.adapter.embed(streams, places), above[:, level.parents], places, mask)

    def _draw(self, scores: Tensor, count: int, draws: Draws) -> Tensor:
        """Draw `count` children of each node `(B, I_d, count)`.

        Where fewer tokens are possible, the rest repeat the first: verification passes over repetitions, and processors
        are never shown a prefix that they themselves excluded.
        """
        possible = min(count, scores.shape[-1])
        if self._do_sample:
            ids, drawn = draws.race(scores.softmax(-1), possible)
        else:
            values, ids = scores.topk(possible, dim=-1)
            drawn = values > _EXCLUDED
        missing = count - possible
        ids, drawn = F.pad(ids, (0, missing)), F.pad(drawn, (0, missing))
        return torch.where(drawn, ids, ids[..., :1])


def _check_place(head: torch.device, target: torch.device) -> None:
    """Warn of a head on another kind of device than its target: it works, but waits for a transfer at every depth."""
    if head.type != target.type:
        logger.warning_once(
            f"The draft head is on {head} and the target's last layer on {target}. Drafting will be slow; move the "
            "head with `head.place(model)`."
        )


def _counts(matches: Sequence[int] | int, rows: int) -> list[int]:
    """New states per row; guided streams share the accepted path of their row."""
    accepted = [matches] if isinstance(matches, int) else list(matches)
    return [n + 1 for n in accepted] * (rows // len(accepted))


class RootOnly(CandidateTree):
    """Proposes nothing: the loop then decodes plainly, one token a pass, guidance in one batch.

    Args:
        columns: Number of columns C.
    """

    requires_model_outputs = False
    tree = DraftTree.root_only()

    def __init__(self, columns: int):
        self._columns = columns

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the sequences as they are, and no scores."""
        return input_ids, torch.empty(len(input_ids), 0, self._columns, device=input_ids.device)
