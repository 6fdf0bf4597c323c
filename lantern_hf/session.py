"""The state of one `lantern_generate` call, and the four steps of a round over it.

Everything a generation knows lives here and dies with it: nothing is kept on the target, so two calls never meet. A
round asks the device once, in `commit`, for the accepted lengths and tokens together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from lantern_hf._host import asking_is_free, on_device
from lantern_hf.acceptance import TreeVerdict, verify_tree_greedy, walk_tree
from lantern_hf.cache import CACHE_KEYWORD, mark_users_cache
from lantern_hf.candidates import CandidateTree
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftModel
from lantern_hf.neighbors import NeighborTable
from lantern_hf.outputs import LanternGenerateOutput, TokenRecorder
from lantern_hf.processors import NodeProcessors, guide, take_guidance
from lantern_hf.prompts import prompt_streams, read_prompts
from lantern_hf.resolve import check_generation, make_generator, pad_token, resolve_neighbors
from lantern_hf.sampling import Draws
from lantern_hf.sequences import ColumnStream, Sequences, StopRules
from lantern_hf.stats import DecodingStats
from lantern_hf.structure import node_offsets
from lantern_hf.targets import adapter_for
from lantern_hf.targets.attention import attention_argument
from lantern_hf.tree import DraftTree


class TargetScores(NamedTuple):
    """What one pass over a tree gives.

    Attributes:
        hidden: Input of the output layer, `(R, N, H)`.
        logits: Raw logits of the columns, `(R, N, C)`.
        layers: States of every layer, each `(R, N, H)`, or None.
    """

    hidden: Tensor
    logits: Tensor
    layers: tuple[Tensor, ...] | None


class Session:
    """One generation; arguments as `lantern_generate`.

    B rows generate. Under guidance every one has a second, unconditional stream: R = 2B rows of the cache, conditional
    ones first.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        assistant: LanternDraftModel | CandidateTree | str | None,
        lantern_config: LanternConfig | Mapping[str, Any] | None,
        neighbors: NeighborTable | None,
        generator: torch.Generator | Sequence[torch.Generator] | None,
        streamer: BaseStreamer | None,
        target_options: Mapping[str, Any] | None,
        model_kwargs: dict[str, Any],
    ):
        check_generation(model, generation_config)
        self.model, self.device = model, input_ids.device
        self.adapter = adapter_for(model, input_ids, **(target_options or {}))
        self.adapter.read_call(input_ids, model_kwargs)
        rows, self._do_sample = len(input_ids), bool(generation_config.do_sample)
        guidance, processors = take_guidance(self.adapter.take_over(processors))
        self._streams = 1 if guidance is None else 2
        self._scale = None if guidance is None else guidance.scale
        self._processors = NodeProcessors(processors, self.adapter.vocab_size, self.adapter.columns, self.adapter)
        self._draws = Draws(generator, rows, self.device)
        self.candidates, self.config = make_generator(
            assistant, lantern_config, model, self.adapter, processors, self._scale, self._do_sample, self._draws
        )
        self.tree = self.candidates.tree.to(self.device)
        self._relaxation, self._neighbors = resolve_neighbors(
            self.config, neighbors, self.candidates, self.adapter, self.device
        )
        self._stop = StopRules(self.adapter.stopping(criteria))
        new = 256 if self._stop.max_length is None else max(self._stop.max_length - input_ids.shape[1], 0)
        self._pad = pad_token(generation_config)
        self.sequences = Sequences(input_ids, new, self._pad)
        self._stream = ColumnStream(streamer, self.sequences, self._pad)
        self._return_dict = bool(generation_config.return_dict_in_generate)
        self._recorder = TokenRecorder.for_call(generation_config, rows, self._processors.expand)
        given = model_kwargs.pop(CACHE_KEYWORD, None)
        if given is not None and model.__dict__.get("_cache") is given:
            del model.__dict__["_cache"]  # older releases keep a static cache for the next call; this one stays empty
        self._given_cache = mark_users_cache(given, generation_config.cache_implementation)
        self._prompts = prompt_streams(self.adapter, input_ids, guidance, model_kwargs)
        self._room = new + self.tree.num_nodes
        self.stats = DecodingStats(rows, max(self.tree.max_depth, 1))
        self._accepted = [0] * rows
        self._offsets = self.adapter.start(input_ids)[:, None]  # of what is decided behind each node, (B, N)
        self._node_scores: Tensor | None = None
        self._ways = [way.to(self.device) for way in _ways_to_nodes(self.candidates.tree)]

    @property
    def rows(self) -> int:
        """B."""
        return self.sequences.num_rows

    @property
    def ended(self) -> list[bool]:
        """Whether each row has ended."""
        return self.sequences.ended

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return all(self.ended)

    # ---- prompt
    # ------------------------------------------------------------------------------------------------------------

    def prefill(self) -> None:
        """Read the prompts of both streams and decide the first token."""
        self._prompt, self._cache, layers = read_prompts(
            self.adapter,
            self._prompts,
            self._given_cache,
            room=self._room,
            all_layers=self._recorder.wanted["hidden_states"],
            device=self.device,
        )
        self._new_hidden, self._new_positions = self._prompt.hidden_states, self._prompt.position_ids
        self._root_positions = self._prompt.position_ids[:, -1] + 1
        self._first_token(layers)

    def _first_token(self, prompt_layers: tuple[Tensor, ...] | None) -> None:
        """Decide the first token from the prompt alone, as plain decoding does."""
        last = self._prompt.hidden_states[:, -1:]
        root = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        self._node_ids = root[:, None]
        self._target = TargetScores(last, self.adapter.logits(last).to(self.device), None)
        probs = self._probs_at(root, [root])
        self._recorder.replace("hidden_states", prompt_layers)  # plain decoding gives those of the whole prompt here
        self._emit(TreeVerdict(root[:, None], root, probs, probs.new_zeros(self.rows)))

    # ---- a round
    # -----------------------------------------------------------------------------------------------------------

    def draft(self) -> None:
        """Ask the generator for a tree."""
        first = self.stats.passes == 0
        self._context = self.sequences.right_aligned()
        kwargs: dict[str, Any] = {
            "position_ids": self._new_positions,
            "sequences": self.sequences,
            "image_offset": self._root_offset,
        }
        if first:
            kwargs |= {"attention_mask": self._prompt.mask, "prompt_embeds": self._prompt.embeds}
        ids, scores = self.candidates.get_candidates(
            self._context,  # type: ignore[arg-type]
            model_kwargs=kwargs,
            model_outputs=ModelOutput(hidden_states=(self._new_hidden,)),
            is_first_iteration=first,
            n_last_matches=self._accepted,
        )
        self._node_ids = ids[:, self._context.shape[1] - 1 :].to(self.device)
        self._draft_probs = self._draft_distributions(scores.to(self.device))
        self._offsets = node_offsets(self.adapter, self._root_offset, self._node_ids, self.tree)

    def score(self, attention: str) -> None:
        """Run the target once over the tree, in every stream."""
        mask = self._cache.tree_mask(self.tree.mask)
        hidden, layers = self.adapter.tree_pass(
            self._node_ids.repeat(self._streams, 1),
            self._root_positions[:, None] + self.tree.depths,
            attention_argument(mask, attention, self.model.dtype),
            self._cache.cache,
            all_layers=self._recorder.wanted["hidden_states"],
        )
        self._target = TargetScores(hidden, self.adapter.logits(hidden).to(self.device), layers)

    def accept(self) -> TreeVerdict:
        """Choose the path to keep and the distribution of the token after it."""
        relaxed_greedy = not self._do_sample and not self._relaxation.strict
        dense = self._score_nodes() if relaxed_greedy or self.candidates.requires_target_scores else None
        self._node_scores = dense
        columns = self.adapter.columns_of(self._node_ids)
        if relaxed_greedy and dense is not None:
            knobs = self._relaxation
            verdict = verify_tree_greedy(
                self.tree,
                columns,
                dense.softmax(-1),
                neighbors=self._neighbors,
                neighborhood_size=knobs.neighborhood_size,
                lam=knobs.lam,
                delta=knobs.delta,
            )
            for depth in range(verdict.path.shape[1]):  # only to record what was asked for
                self._probs_at(verdict.path[:, depth].clamp_min(0), [])
            return verdict
        # Greedy decoding leaves the random state alone: any draw accepts a token of probability 1, and none one of 0.
        draws = (
            self._draws.uniform(self.tree.num_nodes)
            if self._do_sample
            else torch.zeros_like(columns, dtype=torch.float)
        )
        return walk_tree(
            self.tree,
            columns,
            self._probs_at,
            self._draft_probs,
            draws,
            neighbors=self._neighbors,
            relaxation=self._relaxation,
            residual=self.config.residual,
            stop_early=asking_is_free(self.device),
        )

    def commit(self, verdict: TreeVerdict) -> None:
        """Emit the accepted tokens up to the first stop, keep their keys and values, forget the rest of the tree."""
        counts = self._emit(verdict)
        path = verdict.path.clamp_min(0)
        nodes = path.repeat(self._streams, 1)
        hidden, width = self._target.hidden, max(max(counts), 1)
        index = nodes[:, :width].to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1])
        self._new_hidden = hidden.gather(1, index)
        self._new_positions = self._root_positions[:, None] + torch.arange(width, device=self.device)
        self._cache.keep(path if self.rows == 1 else nodes, counts * self._streams)
        self._root_positions = self._root_positions + on_device(counts * self._streams, self.device)
        scores = self._node_scores if self.candidates.requires_target_scores else None
        self.candidates.update_candidate_strategy(self._context, scores, verdict.accepted_length, verdict.path)

    def _probs_at(self, node: Tensor, path: list[Tensor]) -> Tensor:
        """Target distribution at one node a row, `(B, C)`, and a note of its scores for whoever asked for them."""
        rows = torch.arange(self.rows * self._streams, device=self.device)
        raw = self._target.logits[rows, node.repeat(self._streams)]
        if self._node_scores is not None:
            scores = self._node_scores[rows[: self.rows], node]
        else:
            suffix = self._tokens_on(path[1:]) if self._processors.needs_prefix else None
            offset = self._offsets[rows[: self.rows], node]
            scores = self._processors(self.sequences, suffix, guide(raw, self._scale), offset)
        layers = self._target.layers
        if layers is not None:
            layers = tuple(
                layer[rows[: self.rows].to(layer.device), node.to(layer.device)][:, None] for layer in layers
            )
        self._recorder.step(scores=scores, logits=raw[: self.rows], hidden_states=layers)
        return self._distribution(scores)

    def _tokens_on(self, path: list[Tensor]) -> Tensor:
        """Tokens of a path's nodes, each node given as `(B,)`: `(B, T)`.

        A row that stopped earlier repeats its last node, and processors may not know such a sequence (a trie allows
        nothing behind it). Its answer is not read, so it shows the first path of that length.
        """
        if not path:
            return self._node_ids[:, :0]
        nodes, length = torch.stack(path, dim=1), len(path)
        goes_on = self.tree.depths[nodes[:, -1:]] == length
        first = self.tree.paths[(self.tree.paths[:, length] >= 0).long().argmax(), 1 : length + 1]
        return self._node_ids.gather(1, torch.where(goes_on, nodes, first))

    def _draft_distributions(self, scores: Tensor) -> Tensor:
        """Distributions that the nodes were drawn from; a greedy draft was not drawn, and every node may be tested."""
        return scores.float().softmax(-1) if self._do_sample else scores.new_ones(()).float().expand(scores.shape)

    def _distribution(self, scores: Tensor) -> Tensor:
        """What the next token is drawn from: the softmax, or all mass on the best token when greedy."""
        if self._do_sample:
            return scores.float().softmax(-1)
        # Not `one_hot`, which reads its input on the host to check it.
        return torch.zeros_like(scores, dtype=torch.float).scatter_(-1, scores.argmax(-1, keepdim=True), 1)

    def _score_nodes(self) -> Tensor:
        """Processed scores of every node, `(B, N, C)`."""
        guided = guide(self._target.logits, self._scale)
        ways = (self._node_ids[:, way] for way in self._ways)
        return self._processors.nodes(self.sequences, ways, guided, self._offsets)

    def _emit(self, verdict: TreeVerdict) -> list[int]:
        """Bring a round's tokens to the host, end rows, and hand the tokens on; gives how many each row got."""
        probs = verdict.next_probs
        chosen = self._draws.race(probs, 1)[0][:, 0] if self._do_sample else probs.argmax(-1)
        accepted = verdict.accepted_length[:, None]
        tokens = self._node_ids.gather(1, verdict.path[:, 1:].clamp_min(0))
        bonus = self.adapter.token_ids(chosen)
        tokens = torch.nn.functional.pad(tokens, (0, 1)).scatter(1, accepted, bonus[:, None])
        last = verdict.path.gather(1, accepted)
        self._root_offset = self.adapter.advance(self._offsets.gather(1, last).squeeze(1), bonus)
        # The one place of a round that waits for the device: lengths and tokens in one transfer.
        host = torch.cat([accepted, tokens], dim=1).tolist()
        active = [not end for end in self.ended]
        new = [row[1 : row[0] + 2] if going else [] for row, going in zip(host, active, strict=True)]
        ended = self._stop.cut(self.sequences, new, tokens, self._recorder.so_far)
        counts = [len(row) for row in new]
        self._recorder.emit(counts)
        self.sequences.ended = [before or now for before, now in zip(self.ended, ended, strict=True)]
        self._stream.push(new, self.ended)
        self._accepted = [count - 1 for count in counts]
        self._count(verdict, counts, active)
        return counts

    def _count(self, verdict: TreeVerdict, counts: list[int], active: list[bool]) -> None:
        """Add a round to the statistics; the prompt's is counted apart."""
        if self.stats.prefill_passes == 0:
            self.stats.add_prefill()
            return
        last = verdict.path.gather(1, verdict.accepted_length[:, None]).squeeze(1)
        self.stats.add_round(
            verdict.accepted_length,
            verdict.relaxed_tv,
            drafted_nodes=self.tree.num_nodes - 1,
            new_tokens=on_device(counts, self.device),
            tested_depth=verdict.accepted_length + (self.tree.children[last] >= 0).any(1),
            active=on_device(active, self.device),
        )

    def result(self) -> LanternGenerateOutput | Tensor:
        """Close the stream and give what `generate` returns."""
        self._stream.end()
        sequences = self.sequences.padded()
        if not self._return_dict:
            return sequences
        return LanternGenerateOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=self._recorder.result("scores"),
            logits=self._recorder.result("logits"),
            hidden_states=self._recorder.result("hidden_states"),
            **{CACHE_KEYWORD: self._cache.cache},  # type: ignore[arg-type]
            stats=self.stats,
        )


def _ways_to_nodes(tree: DraftTree) -> list[Tensor]:
    """Node ids on the way from the root to every node, the root left out."""
    return [line.nonzero().flatten()[1:] for line in tree.mask]
