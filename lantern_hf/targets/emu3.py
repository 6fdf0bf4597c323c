"""Emu3: text and images in one vocabulary, an image as rows of visual tokens that each end with a token of their own.

A prompt that ends inside an image (`...<|image start|>90*90<|image token|>`) asks for the rest of it, and acceptance
may be relaxed. Any other prompt asks for text, and acceptance is strict.

Where rows and the image end is the business of `prefix_allowed_tokens_fn`, as in transformers. An `Emu3ImageLayout`
decides by place alone, so the adapter reads it once as a table and nothing is called while decoding. Any other function
is called with each node's own prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from lantern_hf._placement import read_weight
from lantern_hf.targets.base import TargetAdapter, left_padded, to_module
from lantern_hf.targets.emu3_layout import (
    BEGIN_IMAGE,
    END_IMAGE,
    END_OF_ROW,
    IMAGE_TOKENS,
    Emu3ImageLayout,
    behind_last,
    ids_by_code,
    recognise,
    sizes_in_prompts,
)
from lantern_hf.targets.image_side import Grid

__all__ = ["Emu3Adapter"]


class Emu3Adapter(TargetAdapter):
    """Serves `Emu3ForConditionalGeneration`."""

    family = "emu3"
    model_types = ("emu3",)
    has_codebook = True
    needs_processor = True
    defaults = MappingProxyType({"guidance_scale": 3.0, "top_k": 2048})

    def __init__(self, model: PreTrainedModel, input_ids: Tensor | None = None):
        super().__init__(model, input_ids)
        self._vocabulary: dict[str, int] = model.config.vocabulary_map or {}
        self._by_code = ids_by_code(model)
        self._prompts = input_ids if self._asks_for_image(input_ids) else None
        self._layout: Emu3ImageLayout | None = None
        self._weights: tuple[Tensor, Tensor] | None = None
        if self._prompts is not None:
            codes = set(self._by_code)  # what else may come is not known yet: any id, the visual ones first
            self._emit([*self._by_code, *(token for token in range(self.vocab_size) if token not in codes)])

    @classmethod
    def matches(cls, model: PreTrainedModel) -> bool:
        """Whether the model is Emu3 with its image side."""
        return model.config.model_type == "emu3" and hasattr(model, "lm_head")

    @property
    def codebook_size(self) -> int:
        """Visual tokens, also when a call generates text."""
        return len(self._by_code)

    def codebook(self) -> Tensor | None:
        """Latents of the codes, `(K, 4)`, straight from the model's own VQ model."""
        return read_weight(self.model.model.vqmodel.quantize.embedding)

    def _asks_for_image(self, input_ids: Tensor | None) -> bool:
        """Whether the prompts end inside an image; rows must agree."""
        begin, end = self._vocabulary.get(IMAGE_TOKENS), self._vocabulary.get(END_IMAGE)
        if input_ids is None or begin is None or end is None or not input_ids.shape[1]:
            return False
        inside = (behind_last(input_ids, begin) < behind_last(input_ids, end)).tolist()
        if any(inside) and not all(inside):
            raise ValueError(
                f"{sum(inside)} of {len(inside)} prompts end inside an image and ask for the rest of it, the others "
                "ask for text. Generate images and text in separate calls."
            )
        return all(inside)

    def _emit(self, ids: list[int]) -> None:
        """Set the columns."""
        self._inverse = {}
        self.columns, self.num_codes = torch.tensor(ids, device=self.device), len(self._by_code)

    def take_over(self, processors: LogitsProcessorList) -> LogitsProcessorList:
        """Take out a `prefix_allowed_tokens_fn` that decides by place alone; its answers become a table."""
        prompts = self._prompts
        for processor in processors:
            if prompts is None or type(processor) is not PrefixConstrainedLogitsProcessor:
                continue
            layout = recognise(processor._prefix_allowed_tokens_fn, prompts)
            if layout is not None and sorted(layout.visual_ids) == sorted(self._by_code):
                self._follow(layout, prompts)
                return LogitsProcessorList(other for other in processors if other is not processor)
        return processors

    def _follow(self, layout: Emu3ImageLayout, prompts: Tensor) -> None:
        """Emit what the layout allows, and nothing else.

        Raises:
            ValueError: It has sizes for another number of prompts.
        """
        rows, sizes = len(prompts), len(layout.sizes)
        if rows % sizes:
            raise ValueError(
                f"The Emu3ImageLayout has {sizes} sizes for {rows} sequences. Give one size, or one per prompt."
            )
        self._layout, self.structured = layout, True
        self._emit([*self._by_code, *dict.fromkeys((*layout.end_ids, layout.pad_id))])
        tables = [torch.tensor([*layout.forced(prompt), layout.pad_id]) for prompt in range(sizes)]
        # Padding is what comes behind an image, for ever: the last entry stands for every later place.
        table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=layout.pad_id)
        self._forced = table.to(prompts.device)
        self._row_tables = torch.arange(rows, device=prompts.device) // (rows // sizes)
        self._visual = torch.arange(self.num_columns, device=prompts.device) < self.num_codes

    def start(self, input_ids: Tensor) -> Tensor:
        """Tokens of its image that each prompt holds already, `(B,)`."""
        if self._prompts is None:
            return super().start(input_ids)
        return behind_last(input_ids, self._vocabulary[IMAGE_TOKENS])

    def forced(self, offset: Tensor) -> Tensor:
        """Id of an end, or of the padding behind an image; -1 where a visual token comes."""
        if self._layout is None:
            return super().forced(offset)
        table, rows = self._forced.to(offset.device), self._row_tables.to(offset.device)
        return table[rows.view(-1, *[1] * (offset.ndim - 1)), offset.clamp(0, table.shape[1] - 1)]

    def allowed(self, offset: Tensor) -> Tensor | None:
        """The visual tokens; what else may come is forced."""
        return None if self._layout is None else self._visual.to(offset.device)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of the columns: of the vocabulary for text, of visual tokens by code and the others for an image."""
        if self.columns is None:
            return super().logits(hidden_states)
        head = self.model.lm_head
        hidden_states = to_module(head, hidden_states)
        # A plain layer is sliced once; a quantised, offloaded or adapted one must be called as a module.
        if self._layout is None or type(head) is not nn.Linear or hasattr(head, "_hf_hook"):
            logits = head(hidden_states)
            return logits[..., self.columns.to(logits.device)]
        if self._weights is None:
            self._weights = self._rows_of(head.weight)
        return torch.cat([F.linear(hidden_states, weight) for weight in self._weights], dim=-1)

    def _rows_of(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the output layer, `(K, H)` for the visual tokens and `(C - K, H)` for the others."""
        assert self.columns is not None
        columns, count, first = self.columns.to(weight.device), self.num_codes, self._by_code[0]
        if self._by_code == list(range(first, first + count)):  # as published: a view, and not a copy of 256 MiB
            return weight[first : first + count], weight[columns[count:]]
        return weight[columns[:count]], weight[columns[count:]]

    def encode(
        self,
        processor: Any,
        prompts: Sequence[str],
        *,
        guided: bool = False,
        height: int | Sequence[int] | None = None,
        width: int | Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Ask for one image a prompt, rows and ends by an `Emu3ImageLayout`; unconditional is a prompt without words.

        `height` and `width` are pixels, 720 by default, or one for each prompt; a token stands for 8 of them.
        """
        if (height is None) != (width is None):
            raise ValueError(f"`height` and `width` go together, got height={height!r}, width={width!r}.")
        sides = [[value] * len(prompts) if isinstance(value, int) else value for value in (height, width)]
        shapes: list[dict[str, Any]] = [{} for _ in prompts]
        if sides[0] is not None and sides[1] is not None:
            shapes = [{"ratio": f"{w}:{h}", "image_area": h * w} for h, w in zip(*sides, strict=True)]

        def read(texts: Sequence[str]) -> list[Any]:
            ask = {"return_for_image_generation": True}
            return [processor(text=[text], **ask, **shape) for text, shape in zip(texts, shapes, strict=True)]

        read_prompts, pad = read(prompts), self.text_config.pad_token_id
        layout = Emu3ImageLayout.for_model(self.model, [one["image_sizes"][0] for one in read_prompts])
        inputs: dict[str, Any] = left_padded([one["input_ids"][0] for one in read_prompts], pad)
        inputs |= {"prefix_allowed_tokens_fn": layout, "max_new_tokens": layout.num_tokens}
        if guided:
            other = left_padded([one["input_ids"][0] for one in read([""] * len(prompts))], pad)
            inputs["negative_prompt_ids"] = other["input_ids"]
            inputs["negative_prompt_attention_mask"] = other["attention_mask"]
        return inputs

    def call_of_rows(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Add the layout of the images whose sizes the prompts state."""
        sizes = None if self._prompts is None else sizes_in_prompts(self._vocabulary, rows["input_ids"])
        layout = {} if sizes is None else {"prefix_allowed_tokens_fn": Emu3ImageLayout.for_model(self.model, sizes)}
        return dict(rows) | layout

    def blank(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """An image prompt without its words: the first token, and what begins the image."""
        if self._prompts is None:
            return self.unconditional(input_ids, attention_mask)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        begun = (input_ids.shape[1] - 1 - behind_last(input_ids, self._vocabulary[BEGIN_IMAGE])).tolist()
        rows = [
            [ids[int(real.argmax())].item(), *ids[begin:].tolist()]
            for ids, real, begin in zip(input_ids, mask, begun, strict=True)
        ]
        padded = left_padded(rows, self.text_config.pad_token_id)
        return padded["input_ids"].to(input_ids.device), padded["attention_mask"].to(input_ids.device)

    def image_sizes(self, input_ids: Tensor) -> list[Grid]:
        """Size of each prompt's image, by the call's `Emu3ImageLayout` or the prompt's own words.

        Raises:
            ValueError: The prompts ask for no image, or do not say of what size.
        """
        if self._prompts is None:
            raise ValueError("These prompts ask for text, not for an image. Decode the tokens with the tokenizer.")
        sizes = sizes_in_prompts(self._vocabulary, input_ids) if self._layout is None else self._layout.sizes
        if sizes is None:
            raise ValueError(
                "The prompts do not say how large their images are. Pass prefix_allowed_tokens_fn=Emu3ImageLayout, or "
                "make them with processor(text=..., return_for_image_generation=True)."
            )
        return [sizes[row * len(sizes) // len(input_ids)] for row in range(len(input_ids))]

    def image_codes(self, token_ids: Tensor) -> list[list[Tensor]]:
        """Read the image of each generated row, `(h, w)` codes; a row that stopped early or has other ends has none.

        Raises:
            ValueError: As `image_sizes`.
        """
        prompts = token_ids if self._prompts is None else self._prompts
        sizes, begun = self.image_sizes(prompts), self.start(prompts).tolist()
        images = []
        for row, tokens in enumerate(token_ids):
            prompt = row * len(prompts) // len(token_ids)
            head = prompts[prompt, prompts.shape[1] - begun[prompt] :].to(tokens.device)
            codes = self._grid(torch.cat([head, tokens]), *sizes[prompt])
            images.append([] if codes is None else [codes])
        return images

    def _grid(self, tokens: Tensor, height: int, width: int) -> Tensor | None:
        """Codes `(h, w)` of an image's tokens, None when they are no complete image."""
        count = height * (width + 1)
        if len(tokens) < count:
            return None
        codes = torch.full((self.vocab_size,), -1, device=tokens.device)
        codes[torch.tensor(self._by_code, device=tokens.device)] = torch.arange(
            self.codebook_size, device=tokens.device
        )
        rows = tokens[:count].view(height, width + 1)
        grid, ends = codes[rows[:, :-1]], rows[:, -1]
        end_of_row = self._vocabulary.get(END_OF_ROW) if self._layout is None else self._layout.end_ids[0]
        wrong: Any = ends != end_of_row
        return None if bool((grid < 0).any() | wrong.any()) else grid

    def pixels(self, codes: Tensor, vq_model: Any = None) -> Tensor:
        """Decode images through the model's own VQ model, as `decode_image_tokens` does.

        Args:
            codes: `(B, h, w)` int64.
            vq_model: Not needed.

        Returns:
            `(B, 3, 8h, 8w)`, nominally in [-1, 1].
        """
        vq = self.model.model.vqmodel
        with torch.no_grad():
            return vq.decode(to_module(vq.quantize.embedding, codes))

    def pixels_per_code(self, vq_model: Any = None) -> int:
        """Side of the square of pixels that a code stands for: 8 as published."""
        return self.model.model.vqmodel.spatial_scale_factor

    def encode_pixels(self, pixels: Tensor, vq_model: Any = None) -> Tensor:
        """Encode `(B, 3, H, W)` images with the model's own VQ model."""
        vq = self.model.model.vqmodel
        sizes = torch.tensor([pixels.shape[-2:]] * len(pixels))
        with torch.no_grad():
            placed = to_module(vq.quantize.embedding, pixels)
            return torch.stack(list(vq.encode(placed, sizes, return_dict=True).image_tokens))
