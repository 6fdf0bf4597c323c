"""GLM-Image: the autoregressive prior of a hybrid, whose codes a diffusion model turns into pixels.

An image is a small grid of codes, then a large one, then an end token; how large is in `image_grid_thw`. The tokens of
a grid stand at three-dimensional positions, which the stock forward infers from how much the cache holds. That is
wrong for a tree and kept on the model, so the adapter works them out itself, once, from the same arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf._host import on_device
from lantern_hf._placement import read_weight
from lantern_hf.cache import CACHE_KEYWORD
from lantern_hf.targets.base import Prefill, TargetAdapter, to_module
from lantern_hf.targets.image_side import Grid

_NO_PIXELS = (
    "GLM-Image's codes are drawn by a diffusion model. Attach the prior of a diffusers GlmImagePipeline, "
    "lantern_hf.attach(pipe.vision_language_encoder, head, default_on=True), and call that pipeline. For the codes "
    "alone pass output_type='latent' to LanternPipeline."
)


class GlmImageAdapter(TargetAdapter):
    """Serves `GlmImageForConditionalGeneration`, also when diffusers' `GlmImagePipeline` calls it.

    With `image_grid_thw` among the arguments of `generate` the structure is kept: codes inside the grids and the end
    token behind them, nothing else. The stock method relies on the model for that. Without it only positions of text
    are known, and any id of the output layer may come.
    """

    family = "glm_image"
    model_types = ("glm_image",)
    has_codebook = True
    codebook_metric = "cosine"
    takes_negative = False
    needs_processor = True

    def __init__(self, model: PreTrainedModel, input_ids: Tensor | None = None):
        super().__init__(model, input_ids)
        self.num_codes = model.config.vq_config.num_embeddings
        self._grids: list[list[Grid]] | None = None
        self._tables: list[Tensor] = []  # positions behind the prompt, (B, 3, L), one a stream
        self._first: list[Tensor] = []  # number of the first new token, (B,), one a stream

    @classmethod
    def matches(cls, model: PreTrainedModel) -> bool:
        """Whether the model is GLM-Image's prior."""
        return model.config.model_type == "glm_image" and hasattr(model, "lm_head")

    @property
    def vocab_size(self) -> int:
        """Outputs of the head; words can be read but not written."""
        return self.text_config.vision_vocab_size

    @property
    def num_columns(self) -> int:
        """Codes and the ids behind them."""
        return self.vocab_size

    def codebook(self) -> Tensor:
        """Latents of the codes, `(K, d)`; the tokenizer compares them at length 1, hence the metric."""
        return read_weight(self.model.model.vqmodel.quantize.embedding)

    @classmethod
    def generate_arguments(cls, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Repeat prompts for `num_return_sequences` with their grids; the common `generate` mixes these up."""
        config = kwargs.get("generation_config") or model.generation_config
        copies = kwargs.get("num_return_sequences") or config.num_return_sequences or 1
        if copies == 1 or kwargs.get("image_grid_thw") is None:
            return None
        names = ("input_ids", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        return kwargs | _repeated(kwargs, copies) | {"num_return_sequences": 1}

    # ---- structure
    # ---------------------------------------------------------------------------------------------------------

    def read_call(self, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
        """Learn which grids each row is to fill.

        Raises:
            ValueError: The grids do not fit the rows.
        """
        if (grids := model_kwargs.get("image_grid_thw")) is None:
            return
        self._grids = _open_grids(
            input_ids, grids, model_kwargs.get("images_per_sample"), self.model.config.image_end_token_id
        )
        self.structured = True

    def start(self, input_ids: Tensor) -> Tensor:
        """Minus the tokens that the row's grids hold, so that the end token comes at 0 whatever their size."""
        if self._grids is None:
            return super().start(input_ids)
        return on_device([-sum(height * width for height, width in grids) for grids in self._grids], input_ids.device)

    def forced(self, offset: Tensor) -> Tensor:
        """The end token behind the grids."""
        return torch.where(offset >= 0, self.model.config.image_end_token_id, -1)

    def allowed(self, offset: Tensor) -> Tensor:
        """Codes alone, `(C,)`."""
        return torch.arange(self.num_columns, device=offset.device) < self.num_codes

    def encode(
        self,
        processor: Any,
        prompts: Sequence[str],
        *,
        guided: bool = False,
        height: int | Sequence[int] | None = None,
        width: int | Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Turn texts into arguments of `generate`, in the words of diffusers' pipeline; 1024 x 1024 by default."""
        if guided:
            raise ValueError(
                "GLM-Image's prior is decoded without guidance, which is the diffusion model's. Leave it out."
            )
        height, width = 1024 if height is None else height, 1024 if width is None else width
        if not (isinstance(height, int) and isinstance(width, int)):
            raise ValueError("GLM-Image's processor takes one size for all prompts. Pass height and width as numbers.")
        chats = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}] for prompt in prompts]
        inputs = processor.apply_chat_template(
            chats,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            padding=len(prompts) > 1,
            target_h=height,
            target_w=width,
        )
        grids = inputs["image_grid_thw"][: int(inputs["images_per_sample"][0])]
        return dict(inputs) | {"max_new_tokens": int(grids.prod(1).sum()) + 1}

    def rows_of_call(self, arguments: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Give each prompt its own grids, `(n, 3)`."""
        counts = arguments["images_per_sample"].tolist()
        rest = {key: value for key, value in arguments.items() if key not in ("image_grid_thw", "images_per_sample")}
        parts = zip(super().rows_of_call(rest), arguments["image_grid_thw"].split(counts), strict=True)
        return [row | {"image_grid_thw": grids} for row, grids in parts]

    def call_of_rows(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Put the grids of all prompts one below the other."""
        if (grids := rows.get("image_grid_thw")) is None or grids.ndim == 2:
            return dict(rows)
        counts = torch.full((len(grids),), grids.shape[1], device=grids.device)
        return dict(rows) | {"image_grid_thw": grids.flatten(0, 1), "images_per_sample": counts}

    def image_sizes(self, input_ids: Tensor) -> list[Grid]:
        """Size of the large grid of each row, which is generated last.

        Raises:
            ValueError: The call's `image_grid_thw` is not known.
        """
        return [grids[-1] for grids in self._known_grids()]

    def image_codes(self, token_ids: Tensor) -> list[list[Tensor]]:
        """The large grid of each row that has all its codes, `(h, w)` int64."""
        found: list[list[Tensor]] = []
        for row, (tokens, grids) in enumerate(zip(token_ids, self._known_grids(), strict=True)):
            codes, (height, width) = self.codes_so_far(tokens, row), grids[-1]
            found.append([codes.view(height, width)] if len(codes) == height * width else [])
        return found

    def codes_so_far(self, token_ids: Tensor, row: int) -> Tensor:
        """Codes of the large grid, `(n,)` int64; the small ones come first."""
        *before, (height, width) = self._known_grids()[row]
        first = sum(h * w for h, w in before)
        return token_ids[first : first + height * width]

    def _known_grids(self) -> list[list[Grid]]:
        """Grids that each row is to fill."""
        if self._grids is None:
            raise ValueError(
                "The size of the grids is not known here; it is in `image_grid_thw` of the call. For pictures attach "
                "the prior of a diffusers GlmImagePipeline with default_on=True, and call the pipeline."
            )
        return self._grids

    def check_decoder(self, vq_model: Any = None) -> None:
        """Refused: a diffusion model draws the pixels.

        Raises:
            ValueError: Always.
        """
        raise ValueError(_NO_PIXELS)

    def pixels(self, codes: Tensor, vq_model: Any = None) -> Tensor:
        """Refused, as `check_decoder`."""
        raise ValueError(_NO_PIXELS)

    def pixels_per_code(self, vq_model: Any = None) -> int:
        """Refused: how an image becomes the small and the large grid is not published.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "How GLM-Image was taught an image as a small and a large grid of codes is not published, so images cannot "
            "be turned into its tokens. Train on sequences that it generates itself: lantern-hf distil."
        )

    # ---- passes
    # ------------------------------------------------------------------------------------------------------------

    def prefill(self, input_ids: Tensor, cache: Any, *, all_layers: bool = False, **model_kwargs: Any) -> Prefill:
        """Read a prompt; what follows it stands where `image_grid_thw` of the first stream says, in every stream."""
        if self._grids is None:
            self.read_call(input_ids, model_kwargs)
        table = self.model.get_input_embeddings()
        ids = to_module(table, self._with_source_codes(input_ids, model_kwargs))
        mask = model_kwargs.get("attention_mask")
        mask = None if mask is None else mask.to(ids.device)
        # On a shallow copy, since the method leaves its results on the module, where two calls would meet.
        positions, _ = copy.copy(self.model.model).get_rope_index(
            ids,
            image_grid_thw=model_kwargs.get("image_grid_thw"),
            images_per_sample=model_kwargs.get("images_per_sample"),
            attention_mask=mask,
        )
        output = self.model.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            output_hidden_states=all_layers,
            **{CACHE_KEYWORD: cache},
        )
        numbers = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if mask is not None:
            numbers = (mask.long().cumsum(-1) - 1).clamp_min(0)
        if self._grids is not None:
            places = decode_positions(self._grids).to(positions.device)
            self._tables.append(places + positions[:, :, -1].amax(0)[:, None, None] + 1)
            self._first.append(numbers[:, -1] + 1)
        layers = output.hidden_states if all_layers else None
        embeds = self.embed(ids, numbers)
        return Prefill(output.last_hidden_state, embeds, numbers, None if mask is None else mask.bool(), layers)

    def _with_source_codes(self, input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        """Put the codes of the images to edit in the place of their placeholders, as the stock forward does."""
        image = (model_kwargs.get("mm_encoder_outputs") or {}).get("image")
        pixels = model_kwargs.get("pixel_values")
        if image is None and pixels is None:
            return input_ids
        grids, per_row = model_kwargs["image_grid_thw"], model_kwargs.get("images_per_sample")
        parts = [grids] if per_row is None else grids.split(per_row.tolist())
        sources = torch.cat([part[:-1] for part in parts])  # the last one is to be generated
        if image is None:
            image = self.model.model.get_image_features(pixels, sources, return_dict=True)
        features = image.pooler_output
        # Newer releases give maps `(H, h, w)`, older ones patches in a row, `(h * w, H)`, whose grids must be told.
        told = (features,) if features[0].ndim == 3 else (torch.cat(list(features)), sources)
        codes = self.model.get_image_tokens(*told).flatten().to(input_ids.device)
        return input_ids.masked_scatter(input_ids == self.model.config.image_token_id, codes)

    def tree_pass(
        self, token_ids: Tensor, position_ids: Tensor, attention_mask: Any, cache: Any, *, all_layers: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Run the decoder over new nodes, at the places of their numbers in the grids."""
        if self._tables:
            position_ids = self._places(position_ids)
        return super().tree_pass(token_ids, position_ids, attention_mask, cache, all_layers=all_layers)

    def _places(self, numbers: Tensor) -> Tensor:
        """Positions `(3, R, N)` of tokens that are the `numbers`-th of their rows, `(R, N)`."""
        if len(self._tables) > 1:
            self._tables, self._first = [torch.cat(self._tables)], [torch.cat(self._first)]
        table, first = self._tables[0].to(numbers.device), self._first[0].to(numbers.device)
        # A tree may reach beyond the end token, where nothing is kept.
        index = (numbers - first[:, None]).clamp(0, table.shape[-1] - 1)
        return table.gather(2, index[:, None].expand(-1, 3, -1)).transpose(0, 1)


def decode_positions(grids: list[list[Grid]]) -> Tensor:
    """Give the positions of generated tokens, counted from the place behind the prompt.

    In a grid that starts at p, the token of row i and column j stands at `(p, p + i, p + j)`; the next grid, or the end
    token, starts at `p + max(height, width)`.

    Args:
        grids: Height and width of each row's grids, in the order in which they are generated.

    Returns:
        `(B, 3, L)` int64, time, height and width; shorter rows repeat the place of their end token.

    Example:
        >>> decode_positions([[(1, 2)]])[0].tolist()
        [[0, 0, 2], [0, 0, 2], [0, 1, 2]]
    """
    rows = []
    for row in grids:
        start, parts = 0, []
        for height, width in row:
            place = torch.cartesian_prod(torch.tensor([0]), torch.arange(height), torch.arange(width))
            parts.append(place.T + start)
            start += max(height, width)
        rows.append(torch.cat([*parts, torch.full((3, 1), start)], dim=1))
    longest = max(row.shape[1] for row in rows)
    return torch.stack([torch.cat([row, row[:, -1:].expand(-1, longest - row.shape[1])], dim=1) for row in rows])


def _open_grids(input_ids: Tensor, grids: Tensor, per_row: Tensor | None, end: int) -> list[list[Grid]]:
    """Height and width of the grids that each prompt leaves to be filled, in the order of generation: last one first.

    A prompt holds the images to edit, each closed by an end token; the grids of the others follow.
    """
    rows = len(input_ids)
    if per_row is not None and (len(per_row) != rows or int(per_row.sum()) != len(grids)):
        raise ValueError(
            f"`images_per_sample` {per_row.tolist()} does not divide {len(grids)} grids of `image_grid_thw` among "
            f"{rows} prompts. Pass what the processor returned, unchanged."
        )
    parts = [grids] * rows if per_row is None else grids.split(per_row.tolist())
    complete = (input_ids == end).sum(1).tolist()
    open_ = [[(h, w) for _, h, w in part.tolist()[done:]][::-1] for part, done in zip(parts, complete, strict=True)]
    if empty := [row for row, part in enumerate(open_) if not part]:
        raise ValueError(
            f"Prompt {empty[0]} closes {complete[empty[0]]} images and `image_grid_thw` has no other for it, so that "
            "nothing is left to generate. Pass the grids of the target image too, as the processor returns them."
        )
    return open_


def _repeated(kwargs: dict[str, Any], copies: int) -> dict[str, Any]:
    """Per-prompt arguments with every prompt `copies` times; grids and pixels are several a prompt."""
    grids, per_row = kwargs["image_grid_thw"], kwargs.get("images_per_sample")
    if per_row is None:
        per_row = grids.new_tensor([len(grids)])
    result = {"images_per_sample": per_row.repeat_interleave(copies)}
    for name in ("input_ids", "attention_mask"):
        if kwargs.get(name) is not None:
            result[name] = kwargs[name].repeat_interleave(copies, 0)
    parts = grids.split(per_row.tolist())
    result["image_grid_thw"] = torch.cat([part for part in parts for _ in range(copies)])
    if (pixels := kwargs.get("pixel_values")) is not None:
        patches = [int(part[:-1].prod(-1).sum()) for part in parts]  # all grids but the target's are of images shown
        result["pixel_values"] = torch.cat([part for part in pixels.split(patches) for _ in range(copies)])
    return result
