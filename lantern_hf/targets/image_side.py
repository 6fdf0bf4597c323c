"""What an adapter knows of its family's images: how they are asked for, how large they are, what they look like.

No pass of the model is made here but that of a decoder of pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

Grid = tuple[int, int]
"""Height and width of an image in codes."""


class ImageSide:
    """The part of `TargetAdapter` that pipelines and `lantern_hf.images` ask. A text model overrides none of it.

    Attributes:
        defaults: Published settings of `generate` for images, such as `guidance_scale` and `top_k`: what pipelines use
            where neither the user nor the model's generation config says otherwise.
        takes_negative: Whether a text can be the negative prompt; otherwise the unconditional prompt is the family's.
        needs_processor: Whether `encode` needs the model's processor, and no tokenizer alone will do.
        num_codes: See `TargetAdapter`.
    """

    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    takes_negative: ClassVar[bool] = True
    needs_processor: ClassVar[bool] = False
    num_codes: int = 0

    def columns_of(self, token_ids: Tensor) -> Tensor:
        """See `TargetAdapter`."""
        raise NotImplementedError

    # ---- asking for images
    # ----------------------------------------------------------------------------------------------------------

    @property
    def asks(self) -> str:
        """What images are drawn from: `"prompt"` or `"class_labels"`."""
        return "prompt"

    def check_prompts(self, processor: Any, prompts: Sequence[str]) -> None:
        """Refuse prompts that ask for nothing, or that the family cannot read.

        Args:
            processor: As in `encode`.
            prompts: Texts.

        Raises:
            ValueError: There is none, or one is empty or too long.
        """
        if not prompts or not all(text.strip() for text in prompts):
            raise ValueError(f"`prompts` must hold text, got {list(prompts)!r}. Pass at least one non-empty text.")

    def encode(
        self,
        processor: Any,
        prompts: Sequence[str],
        *,
        guided: bool = False,
        height: int | Sequence[int] | None = None,
        width: int | Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Turn texts into arguments of `generate` that ask for one image each; see `lantern_hf.image_prompts`.

        Args:
            processor: The model's processor or tokenizer.
            prompts: One text an image.
            guided: Whether to add the unconditional prompts that guidance needs.
            height: Height in pixels, for families of several sizes.
            width: Width in pixels.

        Returns:
            `input_ids`, `attention_mask`, `max_new_tokens` and whatever else the family needs, tensors on any device.

        Raises:
            ValueError: The family makes no images from text alone, or none of this size.
        """
        raise ValueError(
            f"{type(self).__name__} makes no images from text alone. Encode the prompt with the tokenizer."
        )

    def encode_classes(self, labels: Any, *, guided: bool = False) -> dict[str, Any]:
        """Turn class labels into arguments of `generate`, for families that draw classes.

        Args:
            labels: One whole number, or several, or a tensor of them.
            guided: As in `encode`.

        Returns:
            As `encode`.

        Raises:
            ValueError: The family draws no classes, or a label is out of range.
        """
        raise ValueError(f"{type(self).__name__} draws no classes. Pass a prompt.")

    def rows_of_call(self, arguments: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Take the prompts of a call apart, as training keeps them.

        Args:
            arguments: What `encode` or `encode_classes` gave.

        Returns:
            The tensors of each prompt, without a batch dimension and without unconditional prompts.
        """
        tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
        names = [key for key in tensors if not key.startswith("negative_prompt")]
        return [{name: tensors[name][row] for name in names} for row in range(len(tensors["input_ids"]))]

    def call_of_rows(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Undo `rows_of_call`: what a family adds to its prompts is made again.

        Args:
            rows: Tensors of several prompts, stacked: `input_ids` `(B, S)` and `attention_mask`, padded on the left,
                and what else the rows hold, `(B, ...)`. The adapter was made for these prompts.

        Returns:
            Arguments of `generate`, without `max_new_tokens` and guidance.
        """
        return dict(rows)

    # ---- sizes and codes
    # ------------------------------------------------------------------------------------------------------------

    @property
    def grid(self) -> Grid | None:
        """Height and width in codes of every image of the model; None where prompts decide."""
        return None

    def image_sizes(self, input_ids: Tensor) -> list[Grid]:
        """Give the size of the image that each prompt asks for.

        Args:
            input_ids: Prompts as `encode` makes them, `(B, S)` int64; `read_call` has been told the call.

        Returns:
            Height and width in codes, one a row.

        Raises:
            ValueError: The family generates no images, or the prompts do not tell.
        """
        if self.grid is None:
            raise ValueError(f"{type(self).__name__} knows no images. Decode the tokens with the tokenizer.")
        return [self.grid] * len(input_ids)

    def image_codes(self, token_ids: Tensor) -> list[list[Tensor]]:
        """Find the complete images in generated tokens.

        Args:
            token_ids: What `generate` added to the prompts, `(B, T)` int64; rows may end early.

        Returns:
            For each row its images, each `(h, w)` int64 codes.

        Raises:
            ValueError: The family generates no images, or does not know their height and width.
        """
        ((height, width),) = self.image_sizes(token_ids[:1])  # nothing but codes, unless overridden
        whole = token_ids.shape[1] >= height * width
        return [[row[: height * width].view(height, width)] if whole else [] for row in token_ids]

    def codes_so_far(self, token_ids: Tensor, row: int) -> Tensor:
        """Give the codes of an image that is being decoded.

        Args:
            token_ids: What has been added to the prompt so far, `(T,)` int64.
            row: Row of the call.

        Returns:
            `(n,)` int64 in raster order, n up to the image's height times width.
        """
        columns = self.columns_of(token_ids)
        return columns[(columns >= 0) & (columns < self.num_codes)]

    # ---- pixels
    # ---------------------------------------------------------------------------------------------------------------

    def check_decoder(self, vq_model: Any = None) -> None:
        """Refuse, before anything is decoded, codes that `pixels` could not turn into an image.

        Args:
            vq_model: As in `pixels`.

        Raises:
            ValueError: A decoder is needed and missing, or belongs to other codes.
        """

    def pixels(self, codes: Tensor, vq_model: Any = None) -> Tensor:
        """Decode images.

        Args:
            codes: `(B, h, w)` int64.
            vq_model: Decoder, for families whose model has none.

        Returns:
            `(B, 3, H, W)` floating point, nominally in [-1, 1], not clamped.

        Raises:
            ValueError: A decoder is needed and missing.
        """
        raise ValueError(f"{type(self).__name__} decodes no images. Decode the tokens with the tokenizer.")

    def pixels_per_code(self, vq_model: Any = None) -> int:
        """Side of the square of pixels that a code stands for; arguments and errors as `encode_pixels`."""
        raise ValueError(
            f"{type(self).__name__} cannot turn images into tokens. Train on token sequences, or on sequences that the "
            "target generates itself: lantern-hf distil."
        )

    def encode_pixels(self, pixels: Tensor, vq_model: Any = None) -> Tensor:
        """Turn images into codes, the inverse of `pixels`.

        Args:
            pixels: `(B, 3, H, W)` float32 in [-1, 1], sides multiples of `pixels_per_code`.
            vq_model: Encoder, for families whose model has none.

        Returns:
            `(B, h, w)` int64.

        Raises:
            ValueError: An encoder is needed and missing, or the family turns no images into codes.
        """
        self.pixels_per_code(vq_model)
        raise NotImplementedError


def check_vq_model(vq_model: Any, codes: int, missing: str) -> None:
    """Refuse a `diffusers.VQModel` that is not there, or has other codes than the target.

    Args:
        vq_model: The model, or None.
        codes: Codes of the target.
        missing: What to say where there is none.

    Raises:
        ValueError: As above.
    """
    if vq_model is None:
        raise ValueError(missing)
    if (own := vq_model.config.num_vq_embeddings) != codes:
        raise ValueError(
            f"`vq_model` has {own} codes, the target {codes}. Pass the VQ model that this target was trained with."
        )
