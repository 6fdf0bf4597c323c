"""The state of one `lantern_generate` call, and the four steps of a round over it.

Everything a generation knows lives here and dies with it: nothing is kept on the target, so two calls never meet. A round asks the
device once, in `commit`, for the accepted lengths and tokens together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from lantern_hf.acceptance import TreeVerdict, verify_tree_greedy, walk_tree
from lantern_hf.cache import CACHE_KEYWORD, RaggedCache, decoding_cache, merge_streams, new_dynamic_cache
from lantern_hf.candidates import CandidateTree
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftModel
from lantern_hf.neighbors import NeighborTable
from lantern_hf.outputs import LanternGenerateOutput, TokenRecorder
from lantern_hf.processors import NodeProcessors, guide, take_guidance
from lantern_hf.resolve import check_generation, make_generator, resolve_neighbors
from lantern_hf.sampling import Draws
from lantern_hf.sequences import ColumnStream, Sequences, StopRules
from lantern_hf.stats import DecodingStats
from lantern_hf.targets import adapter_for
from lantern_hf.targets.attention import attention_argument
from lantern_hf.targets.base import Prefill
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

    B rows generate. Under guidance every one has a second, unconditional stream: R = 2B rows of the cache, conditional first.
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
        model_kwargs: dict[str, Any],
    ):
        check_generation(model, generation_config)
        self.model, self.device = model, input_ids.device
        self.adapter = adapter_for(model, input_ids)
        self.guidance, processors = take_guidance(processors)
        self._streams = 1 if self.guidance is None else 2
        self._scale = None if self.guidance is None else self.guidance.scale
        self._processors = NodeProcessors(processors, self.adapter.vocab_size, self.adapter.columns)
        self._do_sample = bool(generation_config.do_sample)
        self._draws = Draws(generator, len(input_ids), self.device)
        self.candidates, self.config = make_generator(
            assistant, lantern_config, model, self.adapter, processors, self._scale, self._do_sample, self._draws
        )
        self.tree = self.candidates.tree.to(self.device)
        self._relaxation, self._neighbors = resolve_neighbors(
            self.config, neighbors, self.candidates, self.adapter, self.device
        )
        self._stop = StopRules(criteria)
        new = 256 if self._stop.max_length is None else self._stop.max_length - input_ids.shape[1]
        self.sequences = Sequences(input_ids, max(new, 0))
        self._pad = _pad_token(generation_config)
        self._stream = ColumnStream(streamer, self.sequences, self._pad)
        self._return_dict = bool(generation_config.return_dict_in_generate)
        self._recorder = TokenRecorder(
            len(input_ids),
            scores=self._return_dict and bool(generation_config.output_scores),
            logits=self._return_dict and bool(generation_config.output_logits),
            hidden_states=self._return_dict and bool(generation_config.output_hidden_states),
            expand=self._processors.expand,
        )
        self._model_kwargs, self._slots = model_kwargs, input_ids.shape[1] + max(new, 0) + self.tree.num_nodes
        self._given_cache = model_kwargs.pop(CACHE_KEYWORD, None)
        self.stats = DecodingStats(len(input_ids), max(self.tree.max_depth, 1))
        self.ended = [False] * len(input_ids)
        self._accepted = [0] * len(input_ids)
        self._ways = [way[1:] for way in _ways_to_nodes(self.candidates.tree)]

    @property
    def rows(self) -> int:
        """B."""
        return len(self.ended)

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return all(self.ended)

    # ---- prompt ------------------------------------------------------------------------------------------------------------

    def prefill(self) -> None:
        """Read the prompts of both streams and decide the first token."""
        slots = self._slots + self._unconditional_surplus()
        cache, direct = decoding_cache(
            self._given_cache, self.adapter.text_config, slots=slots, guided=self.guidance is not None
        )
        prompts, caches = [], []
        for input_ids, kwargs in self._prompts():
            caches.append(cache if direct else new_dynamic_cache(self.adapter.text_config))
            all_layers = self._recorder.wanted["hidden_states"]
            prompts.append(self.adapter.prefill(input_ids, caches[-1], all_layers=all_layers, **kwargs))
        widths = [prompt.hidden_states.shape[1] for prompt in prompts]
        if not direct:
            merge_streams(caches, widths, cache)
        self._prompt = _stack(prompts, max(widths))
        mask = self._prompt.mask
        self._cache = RaggedCache(
            cache,
            self.rows * self._streams,
            self.device,
            width=max(widths),
            padding=None if mask is None else ~mask,
        )
        self._new_hidden, self._new_positions = self._prompt.hidden_states, self._prompt.position_ids
        self._root_positions = self._prompt.position_ids[:, -1] + 1
        self._first_token(prompts[0])

    def _prompts(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Ids and model arguments of each stream."""
        input_ids = self.sequences.padded(self._pad)
        kwargs = {key: value for key, value in self._model_kwargs.items() if key not in ("use_cache", "logits_to_keep")}
        prompts = [(input_ids, kwargs)]
        if self.guidance is not None:
            ids, mask = self._unconditional(input_ids, kwargs.get("attention_mask"))
            prompts.append((ids, {} if mask is None else {"attention_mask": mask}))
        return prompts

    def _unconditional(self, input_ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The unconditional prompts, one for each row."""
        assert self.guidance is not None
        ids, own_mask = self.guidance.input_ids, self.guidance.attention_mask
        if ids is None:
            ids, own_mask = self.adapter.unconditional(input_ids, mask)
        if self.rows % len(ids):
            raise ValueError(
                f"`negative_prompt_ids` has {len(ids)} rows for {self.rows} sequences. Pass one row per prompt, or a single one."
            )
        repeats = self.rows // len(ids)
        ids = ids.to(self.device).repeat_interleave(repeats, 0)
        return ids, None if own_mask is None else own_mask.to(self.device).repeat_interleave(repeats, 0)

    def _unconditional_surplus(self) -> int:
        """How much longer the unconditional prompt is than the conditional one."""
        if self.guidance is None or self.guidance.input_ids is None:
            return 0
        return max(0, self.guidance.input_ids.shape[1] - self.sequences.prompt_length)

    def _first_token(self, conditional: Prefill) -> None:
        """Decide the first token from the prompt alone, as plain decoding does."""
        last = self._prompt.hidden_states[:, -1:]
        root = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        self._node_ids, self._node_scores = root[:, None], None
        self._target = TargetScores(last, self.adapter.logits(last).to(self.device), None)
        probs = self._probs_at(root, [root])
        self._recorder.replace("hidden_states", conditional.all_layers)  # plain decoding gives those of the whole prompt here
        self._emit(TreeVerdict(root[:, None], root, probs, probs.new_zeros(self.rows)))

    # ---- a round -----------------------------------------------------------------------------------------------------------

    def draft(self) -> None:
        """Ask the generator for a tree."""
        first = self.stats.passes == 0
        self._context = self.sequences.right_aligned()
        kwargs: dict[str, Any] = {"position_ids": self._new_positions, "sequences": self.sequences}
        if first:
            kwargs |= {"attention_mask": self._prompt.mask, "prompt_embeds": self._prompt.embeds}
        ids, scores = self.candidates.get_candidates(
            self._context,
            model_kwargs=kwargs,
            model_outputs=ModelOutput(hidden_states=(self._new_hidden,)),
            is_first_iteration=first,
            n_last_matches=self._accepted,
        )
        self._node_ids = ids[:, self._context.shape[1] - 1 :].to(self.device)
        self._draft_probs = scores.to(self.device).float().softmax(-1)

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
        uniforms = self._draws.uniform(self.tree.num_nodes)
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
        return walk_tree(
            self.tree,
            columns,
            self._probs_at,
            self._draft_probs,
            uniforms,
            neighbors=self._neighbors,
            relaxation=self._relaxation,
            residual=self.config.residual,
            stop_early=asking_is_free(self.device),
        )

    def commit(self, verdict: TreeVerdict) -> None:
        """Emit the accepted tokens up to the first stop, keep their keys and values, and forget the rest of the tree."""
        counts = self._emit(verdict)
        path = verdict.path.clamp_min(0)
        nodes = path.repeat(self._streams, 1)
        hidden, width = self._target.hidden, max(max(counts), 1)
        index = nodes[:, :width].to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1])
        self._new_hidden = hidden.gather(1, index)
        self._new_positions = self._root_positions[:, None] + torch.arange(width, device=self.device)
        self._cache.keep(path if self.rows == 1 else nodes, counts * self._streams)
        self._root_positions = self._root_positions + torch.tensor(counts * self._streams, device=self.device)
        scores = self._node_scores if self.candidates.requires_target_scores else None
        self.candidates.update_candidate_strategy(self._context, scores, verdict.accepted_length, verdict.path)

    def _probs_at(self, node: Tensor, path: list[Tensor]) -> Tensor:
        """Target distribution at one node a row, `(B, C)`, and a note of its scores for whoever asked for them."""
        rows = torch.arange(self.rows * self._streams, device=self.device)
        raw = self._target.logits[rows, node.repeat(self._streams)]
        if self._node_scores is not None:
            scores = self._node_scores[rows[: self.rows], node]
        else:
            on_path = [self._node_ids.gather(1, step[:, None]) for step in path[1:]]
            suffix = torch.cat(on_path, dim=1) if on_path else self._node_ids[:, :0]
            scores = self._processors(self.sequences, suffix, guide(raw, self._scale))
        layers = self._target.layers
        if layers is not None:
            layers = tuple(layer[rows[: self.rows].to(layer.device), node.to(layer.device)][:, None] for layer in layers)
        self._recorder.step(scores=scores, logits=raw[: self.rows], hidden_states=layers)
        return self._distribution(scores)

    def _distribution(self, scores: Tensor) -> Tensor:
        """What the next token is drawn from: the softmax, or all mass on the best token when greedy."""
        if self._do_sample:
            return scores.float().softmax(-1)
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).float()

    def _score_nodes(self) -> Tensor:
        """Processed scores of every node, `(B, N, C)`."""
        guided = guide(self._target.logits, self._scale)
        return self._processors.nodes(self.sequences, [self._node_ids[:, way] for way in self._ways], guided)

    def _emit(self, verdict: TreeVerdict) -> list[int]:
        """Bring a round's tokens to the host, end rows, and hand the tokens on; gives how many each row got."""
        if self._do_sample:
            chosen = self._draws.race(verdict.next_probs, 1)[0][:, 0]
        else:
            chosen = verdict.next_probs.argmax(-1)
        accepted = verdict.accepted_length[:, None]
        tokens = self._node_ids.gather(1, verdict.path[:, 1:].clamp_min(0))
        tokens = torch.nn.functional.pad(tokens, (0, 1)).scatter(1, accepted, self.adapter.token_ids(chosen)[:, None])
        # The one place of a round that waits for the device: lengths and tokens in one transfer.
        host = torch.cat([accepted, tokens], dim=1).tolist()
        active = [not end for end in self.ended]
        new = [row[1 : row[0] + 2] if going else [] for row, going in zip(host, active, strict=True)]
        ended = self._stop.cut(self.sequences, new, tokens, self._recorder.so_far)
        counts = [len(row) for row in new]
        self._recorder.emit(counts)
        self.ended = [before or now for before, now in zip(self.ended, ended, strict=True)]
        self._stream.push(new, self.ended)
        self._accepted = [count - 1 for count in counts]
        self._count(verdict, counts, active)
        return counts

    def _count(self, verdict: TreeVerdict, counts: list[int], active: list[bool]) -> None:
        """Add a round to the statistics; the prompt's is counted apart."""
        if self.stats.prefill_passes == 0:
            self.stats.add_prefill()
            return
        self.stats.add_round(
            verdict.accepted_length,
            verdict.relaxed_tv,
            drafted_nodes=self.tree.num_nodes - 1,
            new_tokens=torch.tensor(counts, device=self.device),
            active=torch.tensor(active, device=self.device),
        )

    def result(self) -> LanternGenerateOutput | Tensor:
        """Close the stream and give what `generate` returns."""
        self._stream.end()
        sequences = self.sequences.padded(self._pad)
        if not self._return_dict:
            return sequences
        return LanternGenerateOutput(
            sequences=sequences,
            scores=self._recorder.result("scores"),
            logits=self._recorder.result("logits"),
            hidden_states=self._recorder.result("hidden_states"),
            cache=self._cache.cache,
            stats=self.stats,
        )


def _ways_to_nodes(tree: DraftTree) -> list[list[int]]:
    """Node ids from the root to every node, both included."""
    node_of = {path: node for node, path in enumerate(tree.choices, start=1)}
    return [[0]] + [[0, *(node_of[path[:depth]] for depth in range(1, len(path) + 1))] for path in tree.choices]


def asking_is_free(device: torch.device) -> bool:
    """Whether reading a tensor on the host costs nothing, so that a walk may stop when no row goes on."""
    return device.type == "cpu"


def _pad_token(config: GenerationConfig) -> int:
    """The id that fills rows which end early."""
    prepared = getattr(config, "_pad_token_tensor", None)
    if prepared is not None:
        return int(prepared.flatten()[0])
    return 0 if config.pad_token_id is None else int(config.pad_token_id)


def _stack(prompts: list[Prefill], width: int) -> Prefill:
    """Stack the prompts of the streams, shorter ones padded on the left."""
    padded = []
    for prompt in prompts:
        rows, length = prompt.hidden_states.shape[:2]
        missing = width - length
        mask = prompt.mask
        if mask is None:
            mask = torch.ones(rows, length, dtype=torch.bool, device=prompt.position_ids.device)
        padded.append(
            Prefill(
                F.pad(prompt.hidden_states, (0, 0, missing, 0)),
                F.pad(prompt.embeds, (0, 0, missing, 0)),
                F.pad(prompt.position_ids, (missing, 0)),
                F.pad(mask, (missing, 0), value=False),
            )
        )
    fields = [torch.cat(column) for column in zip(*((p.hidden_states, p.embeds, p.position_ids, p.mask) for p in padded), strict=True)]
    return Prefill(*fields)
