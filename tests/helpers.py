"""What several tests of decoding share: plain references, oracles that draft well, cases over the families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from conftest import NUM_CODES, TINY, prompt, tiny_chameleon, tiny_head
from torch import Tensor
from transformers import ChameleonForConditionalGeneration, LogitsProcessorList, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lantern_hf import CandidateTree, DraftTree, ImageTokensLogitsProcessor, LanternConfig, lantern_generate
from lantern_hf.cache import CACHE_KEYWORD
from lantern_hf.targets import adapter_for

BEGIN_IMAGE = 3


class UnblankedChameleon(ChameleonForConditionalGeneration):
    """Chameleon whose forward keeps the logits of image tokens: plain decoding of images, for reference.

    With `blanked_ids` it blanks those of other tokens, as the stock forward blanks those of images. Guidance compares
    log-probabilities, so the two differ by a constant, which a repetition penalty does not forgive.
    """

    blanked_ids: Tensor | None = None

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, logits_to_keep=0, **kwargs):
        outputs = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        if self.blanked_ids is not None:
            logits = logits.index_fill(-1, self.blanked_ids, torch.finfo(logits.dtype).min)
        return CausalLMOutputWithPast(
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{CACHE_KEYWORD: getattr(outputs, CACHE_KEYWORD)},
        )


@dataclass
class Case:
    """A target with a prompt: the model LANTERN decodes, the one plain decoding uses, and arguments of both."""

    name: str
    model: PreTrainedModel
    plain_model: PreTrainedModel
    inputs: dict[str, Any]
    image_ids: Tensor | None = None

    @property
    def emitted(self) -> list[int]:
        """Token ids that may be emitted."""
        adapter = adapter_for(self.model, self.inputs["input_ids"])
        if adapter.columns is not None:
            return adapter.columns[: adapter.num_codes].tolist() if adapter.structured else adapter.columns.tolist()
        ids = set(range(adapter.num_codes or adapter.vocab_size))
        return sorted(ids - (set(adapter.image_token_ids.tolist()) if self.name == "chameleon-text" else set()))

    def plain(self, **kwargs: Any) -> Any:
        """What transformers decodes."""
        if self.image_ids is not None:
            own = [ImageTokensLogitsProcessor(self.image_ids), *kwargs.pop("logits_processor", [])]
            kwargs["logits_processor"] = LogitsProcessorList(own)
        return self.plain_model.generate(**self.inputs, **kwargs)

    def lantern(self, assistant: Any, tree: Any = "eagle_25", **kwargs: Any) -> Any:
        """What LANTERN decodes, strict unless told otherwise."""
        kwargs.setdefault("lantern_config", LanternConfig.strict(tree))
        return self.model.generate(**self.inputs, custom_generate=lantern_generate, assistant=assistant, **kwargs)

    def head(self) -> Any:
        """An untrained head."""
        return tiny_head(self.model)


def make_case(name: str, rows: int = 1, guidance: float | None = None, attention: str = "sdpa", seed: int = 0) -> Case:
    """Give one of the cases `llamagen`, `llama`, `chameleon-text`, `chameleon-image`, unequal prompts if several."""
    model = TINY[name.split("-")[0]](attention)
    inputs = prompt(model, rows, seed, guidance=guidance is not None)
    plain_model, image_ids = model, None
    if name == "chameleon-image":
        inputs["input_ids"][:, -1] = BEGIN_IMAGE
        plain_model = UnblankedChameleon(model.config).eval()
        plain_model.load_state_dict(model.state_dict())
        adapter = adapter_for(model, inputs["input_ids"])
        image_ids = adapter.image_token_ids
        if guidance is not None:
            inputs["negative_prompt_ids"] = torch.tensor([[0, BEGIN_IMAGE]]).repeat(rows, 1)
            plain_model.blanked_ids = torch.tensor(sorted(set(range(48)) - set(adapter.columns.tolist())))
    if guidance is not None:
        inputs["guidance_scale"] = guidance
    return Case(name, model, plain_model, inputs, image_ids)


CASES = ("llamagen", "llama", "chameleon-text", "chameleon-image")


class Oracle(CandidateTree):
    """Proposes a known continuation on a random root-to-leaf path, and wrong tokens everywhere else.

    Args:
        tree: The tree.
        sequences: What should come, `(B, S + new)`; behind its end the oracle guesses.
        emitted: Tokens to be wrong with.
        columns: Number of columns C.
        misses: Chance that a level of the right path is wrong after all, so that rows fall out of step.
    """

    requires_model_outputs = False

    def __init__(self, tree: DraftTree, sequences: Tensor, emitted: list[int], columns: int, misses: float = 0.0):
        self.tree, self._truth, self._columns = tree, sequences, columns
        self._emitted, self._misses = torch.tensor(emitted), misses
        self._random = torch.Generator().manual_seed(0)

    def get_candidates(self, input_ids: Tensor, model_kwargs: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, nodes = len(input_ids), self.tree.num_nodes
        places = torch.randint(len(self._emitted), (rows, nodes), generator=self._random)
        tokens = self._emitted[places]
        for row, length in enumerate(model_kwargs["sequences"].lengths):
            path = self.tree.paths[int(torch.randint(len(self.tree.paths), (1,), generator=self._random))]
            for depth, node in enumerate(path[1:].tolist(), start=1):
                if node < 0 or length + depth > self._truth.shape[1]:
                    break
                truth = int(self._truth[row, length + depth - 1])
                siblings = self.tree.children[self.tree.parents[node]]
                for sibling in siblings[siblings >= 0].tolist():
                    if tokens[row, sibling] == truth:
                        tokens[row, sibling] = self._other(truth)
                if float(torch.rand((), generator=self._random)) >= self._misses:
                    tokens[row, node] = truth
        return torch.cat([input_ids, tokens[:, 1:]], dim=1), torch.zeros(rows, nodes, self._columns)

    def _other(self, token: int) -> int:
        """A token that is not this one."""
        return int(self._emitted[0] if self._emitted[0] != token else self._emitted[1])


def oracle(case: Case, sequences: Tensor, tree: DraftTree, misses: float = 0.2) -> Oracle:
    """An oracle for a case; `misses` makes rows fall out of step."""
    adapter = adapter_for(case.model, case.inputs["input_ids"])
    return Oracle(tree, sequences, case.emitted, adapter.num_columns, misses)


__all__ = ["BEGIN_IMAGE", "CASES", "NUM_CODES", "Case", "Oracle", "make_case", "oracle", "tiny_chameleon"]
