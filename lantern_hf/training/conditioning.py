"""From what people write and draw to what a target reads: prompts to arguments of `generate`, images to tokens.

A conditioner speaks for one target. Rows are dicts: `"prompt"` (text) or `"class_label"` (a number) say what the target
is asked for, and `"height"` and `"width"` (pixels), where a row has them, of what size. What a family prescribes is its
adapter's, as in `LanternPipeline` and `image_prompts`, so that training sees the prompts that users will decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import PIL.Image
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lantern_hf._pipeline_arguments import Parts
from lantern_hf._wrappers import unwrap
from lantern_hf.pipeline import LanternPipeline
from lantern_hf.targets import TargetAdapter, adapter_for
from lantern_hf.targets.image_side import Grid
from lantern_hf.training.binding import bound_adapter, walk
from lantern_hf.training.fingerprint import weights_fingerprint
from lantern_hf.training.images import fit_image, flatten_image, lay_out, to_pixels

__all__ = ["Conditioner", "PipelineConditioner", "ProcessorConditioner", "fit_image", "flatten_image"]

Row = Mapping[str, Any]
Size = tuple[int | None, int | None]
Tokens = Tensor | list[Tensor]

SIDES = ("height", "width")
_SAMPLE: Row = {"prompt": "a", "class_label": 0}


class Conditioner(Protocol):
    """What training asks of a model's other parts.

    Attributes:
        target: The target.
        asks: What rows ask by, `"prompt"` or `"class_label"`.
        size: Height and width in pixels of the images of rows that have none of their own; None is the family's.
        target_options: Options of the target's adapter, as in `lantern_generate`.
    """

    target: PreTrainedModel
    asks: str
    size: Size
    target_options: Mapping[str, Any]

    @property
    def num_tokens(self) -> int | None:
        """Tokens of one image; None where the target generates none."""

    @property
    def fingerprint(self) -> str:
        """A hash of what turns prompts and images into what the target reads."""

    def count(self, row: Row) -> int | None:
        """Give the tokens of the image that a row asks for; None where the target generates none."""

    def check(self, guidance_scale: float = 1.0) -> None:
        """Refuse, before any work, a size or guidance that the family does not have.

        Raises:
            ValueError: As above.
        """

    def encode_prompts(self, rows: Sequence[Row]) -> list[dict[str, Tensor]]:
        """Give the arguments of the target's `generate` for each row, without a batch dimension, on the CPU.

        What belongs to a call and not to a row, the target's adapter adds (`TargetAdapter.call_of_rows`).

        Raises:
            ValueError: A row asks for something that the target cannot be asked for.
        """

    def encode_images(self, images: Sequence[PIL.Image.Image], rows: Sequence[Row] | None = None) -> Tokens:
        """Give the tokens that the target would generate for images, each `(T,)` int64 on the CPU.

        Args:
            images: Images of any size; they are scaled and cut to the size that their row asks for.
            rows: What asks for them; by default rows without a size of their own.

        Returns:
            Row ends and whatever else an image of the family holds included; `(n, T)` where all have one size.

        Raises:
            ValueError: The model cannot read images.
        """


class _Layout(NamedTuple):
    """What an image of one size is made of.

    Attributes:
        grid: Height and width in codes.
        forced: Id that must come at each of its places, `(T,)` int64; -1 where a code comes.
        token_ids: Token id of each code, `(K,)` int64.
    """

    grid: Grid
    forced: Tensor
    token_ids: Tensor


class _ImageConditioner:
    """Conditioner of a target that draws images; arguments as the attributes of `Conditioner`, and parts beside it."""

    def __init__(self, target: PreTrainedModel, parts: Parts, options: Mapping[str, Any], size: Size):
        self.target: PreTrainedModel = target
        self.target_options: Mapping[str, Any] = dict(options)
        self.size: Size = size
        self.asks = "class_label" if self._adapter.asks == "class_labels" else "prompt"
        self._parts = parts
        self._counts: dict[Size, int] = {}
        self._layouts: dict[Size, _Layout] = {}

    @property
    def _adapter(self) -> TargetAdapter:
        """The target's adapter, before any prompt is known."""
        return adapter_for(self.target, **self.target_options)

    @property
    def num_tokens(self) -> int | None:
        """See `Conditioner`."""
        return self.count({})

    @property
    def fingerprint(self) -> str:
        """See `Conditioner`; the target's own parts are told apart elsewhere."""
        parts = [part for part in (self._parts.vq_model, self._parts.text_encoder) if part is not None]
        reader = getattr(self._parts.processor, "tokenizer", self._parts.processor or self._parts.tokenizer)
        words = [] if reader is None else [str(len(reader))]
        size = [] if self.size == (None, None) else [str(self.size)]
        return " ".join([*map(weights_fingerprint, parts), *words, *size])

    def count(self, row: Row) -> int | None:
        """See `Conditioner`."""
        own = getattr(self.target.config, "num_image_tokens", None)
        if own is not None:
            return own
        size = self._size_of(row)
        if size not in self._counts:
            self._counts[size] = self._arguments([_SAMPLE], size)["max_new_tokens"]
        return self._counts[size]

    def check(self, guidance_scale: float = 1.0) -> None:
        """See `Conditioner`."""
        self._arguments([_SAMPLE], self.size, guided=guidance_scale != 1)
        if self.size != (None, None):
            self._check_size(self.size)

    def _check_size(self, size: Size) -> None:
        """Refuse a size that the family would round to another."""
        try:
            unit = self._adapter.pixels_per_code(self._parts.vq_model)
        except ValueError:  # no images are read, and the family's own check has passed
            return
        pairs = zip(size, self._layout(size).grid, strict=True)
        if wrong := [(s, g * unit) for s, g in pairs if s not in (None, g * unit)]:
            raise ValueError(
                f"`height` and `width` must be sizes that the family draws, multiples of {unit} pixels at the least; "
                f"{wrong[0][0]} would become {wrong[0][1]}."
            )

    def encode_prompts(self, rows: Sequence[Row]) -> list[dict[str, Tensor]]:
        """See `Conditioner`. Prompts longer than LlamaGen's prefix are cut, as its training cut them."""
        encoded: dict[int, dict[str, Tensor]] = {}
        for size, places in self._by_size(rows).items():
            asked = [rows[place] for place in places]
            for place, own in zip(places, self._adapter.rows_of_call(self._arguments(asked, size)), strict=True):
                if self.asks == "prompt" and not bool(own["attention_mask"].any()):
                    raise _empty(rows[place])
                encoded[place] = {name: value.cpu() for name, value in own.items()}
        return [encoded[place] for place in range(len(rows))]

    @torch.no_grad()
    def encode_images(self, images: Sequence[PIL.Image.Image], rows: Sequence[Row] | None = None) -> Tokens:
        """See `Conditioner`; the image processor's mean and deviation are used where there is one."""
        adapter, vq_model = self._adapter, self._parts.vq_model
        unit = adapter.pixels_per_code(vq_model)
        encoded: dict[int, Tensor] = {}
        for size, places in self._by_size([{}] * len(images) if rows is None else rows).items():
            (height, width), forced, token_ids = self._layout(size)
            fitted = [fit_image(images[place], width * unit, height * unit) for place in places]
            pixels = to_pixels(fitted, getattr(self._parts.processor, "image_processor", None))
            codes = adapter.encode_pixels(pixels, vq_model)
            encoded |= dict(zip(places, lay_out(forced, token_ids[codes.flatten(1).cpu()]), strict=True))
        tokens = [encoded[place] for place in range(len(images))]
        return torch.stack(tokens) if len({len(one) for one in tokens}) == 1 else tokens

    def _layout(self, size: Size) -> _Layout:
        """What an image of a size is made of."""
        if size not in self._layouts:
            adapter = self._adapter
            arguments = self._arguments([_SAMPLE], size)
            (row,) = adapter.rows_of_call(arguments)
            prompt = {name: value[None].to(adapter.device) for name, value in row.items()}
            ids, adapter = prompt["input_ids"], bound_adapter(self.target, prompt, self.target_options)
            offsets = walk(adapter, ids, ids.new_zeros(1, arguments["max_new_tokens"]))
            codes = torch.arange(adapter.num_codes, device=ids.device)
            forced, token_ids = adapter.forced(offsets)[0].cpu(), adapter.token_ids(codes).cpu()
            self._layouts[size] = _Layout(adapter.image_sizes(ids)[0], forced, token_ids)
        return self._layouts[size]

    def _size_of(self, row: Row) -> Size:
        """Height and width that a row asks for."""
        height, width = (
            own if row.get(name) is None else row[name] for name, own in zip(SIDES, self.size, strict=True)
        )
        for name, side in zip(SIDES, (height, width), strict=True):
            if side is not None and (not isinstance(side, int) or side < 1):
                raise ValueError(f"`{name}` must be a whole number of pixels, at least 1, got {side!r}.")
        return height, width

    def _by_size(self, rows: Sequence[Row]) -> dict[Size, list[int]]:
        """Places of the rows that ask for each size."""
        groups: dict[Size, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(self._size_of(row), []).append(place)
        return groups

    @torch.no_grad()
    def _arguments(self, rows: Sequence[Row], size: Size, *, guided: bool = False) -> dict[str, Any]:
        """Arguments of `generate` for rows of one size, as a pipeline would pass them."""
        adapter = self._adapter
        if self.asks == "class_label":
            if size != (None, None):
                raise ValueError(f"This model draws classes in one size. Leave out `height` and `width`, got {size}.")
            return adapter.encode_classes([_field(row, "class_label") for row in rows], guided=guided)
        reader = self._parts.reader
        if reader is None:
            raise ValueError(
                f"Prompts of {type(self.target).__name__} need its processor. Pass one, or load the model from a "
                "folder that holds it."
            )
        prompts = [_prompt(row) for row in rows]
        return adapter.encode(reader, prompts, guided=guided, height=size[0], width=size[1])


class PipelineConditioner(_ImageConditioner):
    """Conditioner of a `LanternPipeline` of any family: what its calls read, and its VQ model.

    Args:
        pipe: The pipeline, on its device.
        height: Height in pixels of the images, for families of several sizes. Default: the family's.
        width: Their width.
    """

    def __init__(self, pipe: LanternPipeline, *, height: int | None = None, width: int | None = None):
        super().__init__(pipe._target, pipe._parts, pipe._options, (height, width))


class ProcessorConditioner(_ImageConditioner):
    """Conditioner of a transformers model and its processor or tokenizer.

    A target that draws images is asked for them, as by `lantern_hf.image_prompts`; any other reads the text as the
    tokenizer gives it.

    Args:
        target: The target.
        processor: Processor, or tokenizer where the family needs no more; None for a model that draws classes.
        height: As in `PipelineConditioner`.
        width: Their width.
        vq_model: `diffusers.VQModel` that turns images into codes, where the target holds none (LlamaGen, Lumina-mGPT).
        target_options: Options of the target's adapter, as in `lantern_generate`.

    Raises:
        ValueError: The family needs its processor, and this is a tokenizer; or a text model is given a size.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        processor: Any,
        *,
        height: int | None = None,
        width: int | None = None,
        vq_model: Any = None,
        target_options: Mapping[str, Any] | None = None,
    ):
        parts = Parts(processor=processor, vq_model=vq_model)
        super().__init__(unwrap(target), parts, target_options or {}, (height, width))
        name = type(self.target).__name__
        if self._adapter.needs_processor and isinstance(processor, PreTrainedTokenizerBase):
            raise ValueError(f"{name} is asked for images by its processor, not by a tokenizer alone. Pass that.")
        if not self._draws and self.size != (None, None):
            raise ValueError(f"{name} draws no images, so it takes no `height` and `width`. Leave them out.")

    @cached_property
    def _draws(self) -> bool:
        """Whether the target makes images; a Chameleon without a begin-image token cannot be asked for one."""
        return self._adapter.has_codebook and getattr(self._adapter, "begin_image_id", 0) is not None

    def count(self, row: Row) -> int | None:
        """See `Conditioner`."""
        return super().count(row) if self._draws else None

    def check(self, guidance_scale: float = 1.0) -> None:
        """See `Conditioner`."""
        if self._draws:
            super().check(guidance_scale)

    def encode_prompts(self, rows: Sequence[Row]) -> list[dict[str, Tensor]]:
        """See `Conditioner`."""
        if self._draws:
            return super().encode_prompts(rows)
        tokenizer = getattr(self._parts.processor, "tokenizer", self._parts.processor)
        encoded = [{"input_ids": torch.tensor(tokenizer(_prompt(row))["input_ids"])} for row in rows]
        for row, own in zip(rows, encoded, strict=True):
            if not len(own["input_ids"]):
                raise _empty(row)
        return encoded


def _field(row: Row, name: str) -> Any:
    """What a row asks for."""
    if row.get(name) is None:
        raise ValueError(f"This target is asked by `{name}`, which a row lacks; it has {sorted(row)}.")
    return row[name]


def _prompt(row: Row) -> str:
    """The text a row asks for."""
    prompt = _field(row, "prompt")
    if not isinstance(prompt, str):
        raise ValueError(f"`prompt` must be text, got {prompt!r}.")
    if not prompt.strip():
        raise _empty(row)
    return prompt


def _empty(row: Row) -> ValueError:
    """What is said of a prompt without words."""
    return ValueError(f"`prompt` {row['prompt']!r} is empty: it has 0 tokens. Describe the image, or drop the row.")
