"""Lumina-mGPT (arXiv 2408.02657): Chameleon's classes, with images of any size that say how large they are.

An image is begin-image, a token for its height, one for its width, both in squares of two by two codes, then rows of
codes each closed by a newline, and end-image. So a place is known by how many tokens the image has *and* by its size,
which rows of a batch choose for themselves; both are packed into the offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf.targets.base import left_padded
from lantern_hf.targets.chameleon import TEXT, ChameleonAdapter
from lantern_hf.targets.image_side import Grid

MAX_GRID = 64
"""Longest side in squares of two by two codes; the published models go up to 4:1 at 1024 x 1024 pixels."""

_SIZES = 2
_HEIGHT, _WIDTH, _FIELD = 24, 32, 0xFF
_COUNT = (1 << _HEIGHT) - 1


def pack(count: Tensor, height: Tensor | int, width: Tensor | int) -> Tensor:
    """Pack tokens so far, height and width (in squares, 0 when not known yet) into one int64."""
    return count | (torch.as_tensor(height) << _HEIGHT) | (torch.as_tensor(width) << _WIDTH)


def unpack(offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Undo `pack`; of a negative offset comes nothing of use."""
    return offset & _COUNT, (offset >> _HEIGHT) & _FIELD, (offset >> _WIDTH) & _FIELD


class LuminaAdapter(ChameleonAdapter):
    """Serves Lumina-mGPT checkpoints, loaded into `ChameleonForConditionalGeneration`.

    Args:
        model: The target.
        input_ids: Prompts of the call.
        height: Height in pixels of images whose size the prompt leaves open, or one for each prompt. Default: the model
            chooses.
        width: Their width.
        interleaved: As in `ChameleonAdapter`.
        special_ids: As in `ChameleonAdapter`; `size` is the id of size 0, and size n is n further.

    Raises:
        ValueError: As `ChameleonAdapter`, or a size is no multiple of the square, or another than the prompt's.
    """

    family = "lumina_mgpt"
    SPECIAL_TOKENS: ClassVar[dict[str, str]] = {
        **ChameleonAdapter.SPECIAL_TOKENS,
        "newline": "<reserved08799>",
        "size": "<reserved08800>",
    }

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor | None = None,
        *,
        height: int | Sequence[int] | None = None,
        width: int | Sequence[int] | None = None,
        interleaved: bool = False,
        special_ids: Mapping[str, int] | None = None,
    ):
        super().__init__(model, input_ids, interleaved=interleaved, special_ids=special_ids)
        rows = 1 if input_ids is None else len(input_ids)
        sides = (self._squares("height", height, rows), self._squares("width", width, rows))
        if (sides[0] is None) != (sides[1] is None):
            raise ValueError(f"`height` and `width` come together, got height={height!r} and width={width!r}.")
        self._wanted = None if sides[0] is None else torch.tensor(sides, device=self.device)  # (2, B)
        if self.structured:
            first = self.special_id("size")
            assert self.columns is not None
            self._is_size = (self.columns > first) & (self.columns <= first + MAX_GRID)
            self._check_prompts(input_ids)

    @classmethod
    def matches(cls, model: PreTrainedModel) -> bool:
        """Whether the checkpoint says that it is Lumina-mGPT."""
        architectures = model.config.architectures or []
        return super().matches(model) and any("XLLMX" in name for name in architectures)

    @property
    def pixels_per_square(self) -> int:
        """Side of a square of two by two codes, in pixels: 32 for the published models."""
        return 2 * self.pixels_per_token

    def _squares(self, name: str, value: int | Sequence[int] | None, rows: int) -> list[int] | None:
        """Turn a side in pixels, or one a row, into squares."""
        if value is None:
            return None
        values = [value] * rows if isinstance(value, int) else list(value)
        unit = self.pixels_per_square
        if len(values) != rows:
            raise ValueError(f"`{name}` has {len(values)} values for {rows} prompts. Pass one, or one for each.")
        for side in values:
            if side % unit or not unit <= side <= MAX_GRID * unit:
                raise ValueError(
                    f"`{name}` must be a multiple of {unit} pixels from {unit} to {MAX_GRID * unit}, got {side!r}."
                )
        return [side // unit for side in values]

    def _check_prompts(self, input_ids: Tensor | None) -> None:
        """Refuse prompts whose own size tokens are none, or differ from the size asked for."""
        if input_ids is None:
            return
        for row, offset in enumerate(self.start(input_ids).tolist()):
            if offset < 0:
                continue
            count, *sides = (int(field) for field in unpack(torch.tensor(offset)))
            for axis, name in enumerate(("height", "width")[: min(count, _SIZES)]):
                wanted = None if self._wanted is None else int(self._wanted[axis, row])
                if not 1 <= sides[axis] <= MAX_GRID or wanted not in (None, sides[axis]):
                    raise ValueError(
                        f"Prompt {row} has {name} token {sides[axis]} behind its begin-image token, "
                        f"{'sizes are 1 to ' + str(MAX_GRID) if wanted is None else f'{wanted} was asked for'}. "
                        "Leave `height` and `width` out, or end the prompt with the begin-image token."
                    )

    def _structural_ids(self) -> list[int]:
        first = self.special_id("size")
        last = min(first + MAX_GRID, self.vocab_size - 1)
        codes = set(self.image_token_ids.tolist())
        sizes = [token for token in range(first + 1, last + 1) if token not in codes]
        return [self.special_id("end_image"), self.special_id("newline"), self._closing_id, *sizes]

    @property
    def _closing_id(self) -> int:
        """The end of the turn, which is the separator of the conversation."""
        return self.special_id("separator")

    def codebook(self) -> Tensor | None:
        """None: the published checkpoints hold no VQ weights, so that what transformers has loaded is random."""
        return None

    def unconditional(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The image alone, from its begin-image token on."""
        if not self.structured or self.interleaved:
            return super().unconditional(input_ids, attention_mask)
        padded = left_padded(self._open_images(input_ids), self.special_ids["pad"] or 0)
        return padded["input_ids"].to(input_ids.device), padded["attention_mask"].to(input_ids.device)

    # ---- structure
    # ---------------------------------------------------------------------------------------------------------

    def start(self, input_ids: Tensor) -> Tensor:
        """Packed place in the open image of each prompt, -1 in text."""
        count = super().start(input_ids)
        if not self.structured:
            return count
        begin = input_ids.shape[1] - 1 - count
        sides = [
            torch.where(
                count > place,
                self._size_of(input_ids.gather(1, (begin + 1 + place).clamp(0, input_ids.shape[1] - 1)[:, None])[:, 0]),
                0,
            )
            for place in range(_SIZES)
        ]
        return torch.where(count >= 0, pack(count, *sides), TEXT)

    def _size_of(self, token_ids: Tensor) -> Tensor:
        """Squares that a size token stands for; of another token comes a number that fits the field."""
        return (token_ids - self.special_id("size")).clamp(0, _FIELD)

    def advance(self, offset: Tensor, token_ids: Tensor) -> Tensor:
        """One further, with the size that a size token tells."""
        count, height, width = unpack(offset)
        size = self._size_of(token_ids)
        behind = pack(count + 1, torch.where(count == 0, size, height), torch.where(count == 1, size, width))
        if not self.interleaved:
            return behind
        inside = (offset >= 0) & (token_ids != self.special_id("end_image"))
        begins = torch.where(token_ids == self.special_id("begin_image"), 0, TEXT)
        return torch.where(inside, behind, begins)

    def forced(self, offset: Tensor) -> Tensor:
        """Sizes where they are asked for, a newline behind each row of codes, the end-image token behind the rows."""
        count, height, width = unpack(offset)
        place, row = count - _SIZES, 2 * width + 1
        rows = 2 * height * row
        ids = torch.where((place >= 0) & (place % row == row - 1), self.special_id("newline"), -1)
        ids = torch.where(place == rows, self.special_id("end_image"), ids)
        ids = torch.where(place > rows, self._closing_id, ids)
        if self._wanted is None:
            ids = torch.where(place < 0, -1, ids)
        else:
            wanted = self._wanted.to(offset.device) + self.special_id("size")
            wanted = wanted.view(2, -1, *[1] * (offset.ndim - 1))
            ids = torch.where(place < 0, torch.where(count == 0, wanted[0], wanted[1]), ids)
        return torch.where(offset >= 0, ids, -1)

    def allowed(self, offset: Tensor) -> Tensor | None:
        """Sizes, then codes in an image, everything but codes in text."""
        is_code, is_size = self._is_code.to(offset.device), self._is_size.to(offset.device)
        count = (offset & _COUNT)[..., None]
        image = torch.where(count < _SIZES, is_size, is_code)
        return torch.where((offset >= 0)[..., None], image, ~is_code) if self.interleaved else image

    # ---- text and images of users
    # ------------------------------------------------------------------------------------------

    def encode(
        self,
        processor: Any,
        prompts: Sequence[str],
        *,
        guided: bool = False,
        height: int | Sequence[int] | None = None,
        width: int | Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Ask for one image a prompt, in the published words, its size tokens included.

        `height` and `width` are pixels, 768 by default, or one for each prompt.
        """
        default = 24 * self.pixels_per_square
        heights = self._squares("height", default if height is None else height, len(prompts)) or []
        widths = self._squares("width", default if width is None else width, len(prompts)) or []
        unit, size, begin = self.pixels_per_square, self.special_id("size"), self.special_id("begin_image")
        sizes = list(zip(heights, widths, strict=True))
        texts = [
            f"Generate an image of {w * unit}x{h * unit} according to the following prompt:\n{prompt}"
            for prompt, (h, w) in zip(prompts, sizes, strict=True)
        ]
        tails = [[begin, size + h, size + w] for h, w in sizes]
        inputs = self._encode_text(processor, texts, tails)
        inputs |= {"max_new_tokens": max(2 * h * (2 * w + 1) + 1 for h, w in sizes), "eos_token_id": self._closing_id}
        if guided:
            inputs["negative_prompt_ids"] = torch.tensor(tails)
        return inputs

    def call_of_rows(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Add what ends an image that is smaller than others of the call."""
        ends = self.structured and not self.interleaved
        return dict(rows) | ({"eos_token_id": self._closing_id} if ends else {})

    def encode_pixels(self, pixels: Tensor, vq_model: Any = None) -> Tensor:
        """Encode `(B, 3, H, W)` images with Chameleon's VQ; the published checkpoints hold none of their own.

        Raises:
            ValueError: `vq_model` is missing, or has other codes.
        """
        from lantern_hf.models.vq import encode_pixels  # diffusers takes long to import

        self.check_decoder(vq_model)
        return encode_pixels(vq_model, pixels)

    def image_sizes(self, input_ids: Tensor) -> list[Grid]:
        """Size of each image: as its prompt's size tokens say, or as the call asks for.

        Raises:
            ValueError: Neither says it, so that the model chooses.
        """
        sizes = []
        for row, offset in enumerate(self.start(input_ids)):
            count, *sides = (int(field) for field in unpack(offset))
            if self._wanted is not None:
                sides = self._wanted[:, row].tolist()
            elif not self.structured or offset < 0 or count < _SIZES:
                raise ValueError(
                    f"Prompt {row} does not say how large its image is. End it with size tokens, as image_prompts "
                    "does, or pass target_options={'height': ..., 'width': ...}."
                )
            sizes.append((2 * sides[0], 2 * sides[1]))
        return sizes

    def _read_image(self, tokens: list[int], place: int) -> tuple[Tensor | None, int]:
        head = tokens[place : place + _SIZES]
        if len(head) < _SIZES:
            return None, len(tokens)
        height, width = (2 * (token - self.special_id("size")) for token in head)
        if not all(2 <= side <= 2 * MAX_GRID for side in (height, width)):
            raise ValueError(f"Tokens {head} behind a begin-image token are no sizes. Pass what `generate` gave.")
        count, place = height * (width + 1), place + _SIZES
        body = tokens[place : place + count]
        if len(body) < count:
            return None, len(tokens)
        ends, newline = body[width :: width + 1], self.special_id("newline")
        if ends != [newline] * height:
            raise ValueError(f"An image of {height} x {width} codes has a row that no newline ({newline}) closes.")
        del body[width :: width + 1]
        place += count
        place += place < len(tokens) and tokens[place] == self.special_id("end_image")
        return self._codes(body).view(height, width), place
