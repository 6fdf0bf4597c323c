"""What an Emu3 image is made of: visual tokens in rows, the tokens that end rows and image, the sizes in prompts.

Plain ids and sizes; knows no adapter and no decoding.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["Emu3ImageLayout"]

BEGIN_IMAGE, IMAGE_TOKENS = "<|image start|>", "<|image token|>"
END_OF_ROW, END_OF_FRAME, END_IMAGE = "<|extra_200|>", "<|extra_201|>", "<|image end|>"


@dataclass(frozen=True)
class Emu3ImageLayout:
    """What may come at each place of an Emu3 image; meant as `prefix_allowed_tokens_fn` of `generate`.

    An image of h x w is h rows of w visual tokens, each closed by end-of-row; then end-of-frame, end-of-image and
    end-of-sequence. Padding follows. LANTERN reads the layout as a table and never calls it.

    Args:
        sizes: Height and width in tokens: one for every prompt, or one per prompt. At least 1 each.
        visual_ids: Ids of the visual tokens in the order of their codes.
        image_token_id: Id that stands right before the first visual token.
        end_ids: Ids of end-of-row, end-of-frame, end-of-image and end-of-sequence.
        pad_id: Id of padding.

    Raises:
        ValueError: There is no size, or one that is no image.

    Example:
        >>> layout = Emu3ImageLayout(((1, 2),), visual_ids=(7, 8), image_token_id=5, end_ids=(1, 2, 3, 4), pad_id=0)
        >>> layout.num_tokens, layout.forced()
        (6, [-1, -1, 1, 2, 3, 4])
        >>> layout(0, torch.tensor([9, 5])), layout(0, torch.tensor([9, 5, 7, 8]))
        ([7, 8], [1])
    """

    sizes: tuple[tuple[int, int], ...]
    visual_ids: Sequence[int]
    image_token_id: int
    end_ids: tuple[int, int, int, int]
    pad_id: int

    def __post_init__(self) -> None:
        if not self.sizes or any(min(size) < 1 for size in self.sizes):
            raise ValueError(
                f"`sizes` must be heights and widths of at least 1 token, got {self.sizes}. Take them from "
                "`image_sizes`, which the processor gives with `return_for_image_generation=True`."
            )

    @classmethod
    def for_model(cls, model: PreTrainedModel, image_sizes: Any) -> Emu3ImageLayout:
        """Make the layout of images to be generated.

        Args:
            model: The Emu3 model; it knows the ids.
            image_sizes: Height and width in tokens, `(2,)` for all prompts or `(B, 2)`, as the processor gives them.

        Raises:
            ValueError: The model's vocabulary lacks a token of the structure, or a size is no image.
        """
        config: Any = model.config
        vocabulary, text = config.vocabulary_map or {}, config.get_text_config()
        names = (IMAGE_TOKENS, END_OF_ROW, END_OF_FRAME, END_IMAGE)
        if missing := [name for name in names if name not in vocabulary]:
            raise ValueError(
                f"`vocabulary_map` in the configuration of this {type(model).__name__} lacks {', '.join(missing)}. "
                "Make an Emu3ImageLayout with the ids of your tokenizer."
            )
        image_token, end_of_row, end_of_frame, end_image = (vocabulary[name] for name in names)
        eos = text.eos_token_id[0] if isinstance(text.eos_token_id, list) else text.eos_token_id
        sizes = tuple((int(h), int(w)) for h, w in torch.as_tensor(image_sizes).reshape(-1, 2).tolist())
        return cls(
            sizes[:1] if len(set(sizes)) == 1 else sizes,  # one size serves any number of prompts
            ids_by_code(model),
            image_token,
            (end_of_row, end_of_frame, end_image, eos),
            text.pad_token_id,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the largest image, its ends included: `max_new_tokens` of a call. 8,193 for 90 x 90."""
        return max(height * (width + 1) + 3 for height, width in self.sizes)

    def forced(self, prompt: int = 0) -> list[int]:
        """Id that must come at each place of a prompt's image, -1 where any visual token may; padding follows."""
        height, width = self.sizes[prompt if len(self.sizes) > 1 else 0]
        end_of_row, *ends = self.end_ids
        return ([-1] * width + [end_of_row]) * height + ends

    def __call__(self, batch_id: int, input_ids: Tensor) -> list[int]:
        """Give the ids that may come next, as `generate` asks.

        Args:
            batch_id: Number of the prompt.
            input_ids: Its tokens so far, `(length,)` int64, the prompt's among them.

        Raises:
            ValueError: No image has begun.
        """
        begun = (input_ids == self.image_token_id).nonzero()
        if not len(begun):
            raise ValueError(
                f"The prompt holds no {IMAGE_TOKENS!r} (id {self.image_token_id}), behind which an image begins. Make "
                "it with processor(text=..., return_for_image_generation=True)."
            )
        height, width = self.sizes[batch_id if len(self.sizes) > 1 else 0]
        row, column = divmod(len(input_ids) - 1 - int(begun[-1]), width + 1)
        if row < height:
            return list(self.visual_ids) if column < width else [self.end_ids[0]]
        behind = (row - height) * (width + 1) + column
        return [self.end_ids[1 + behind] if behind < 3 else self.pad_id]


def ids_by_code(model: PreTrainedModel) -> list[int]:
    """Ids of the visual tokens in the order of their codes."""
    mapping: Any = model
    by_code = mapping.model.vocabulary_mapping.img2bpe
    return [by_code[code] for code in sorted(by_code)]


def behind_last(input_ids: Tensor, token_id: int) -> Tensor:
    """Count the tokens behind the last one of an id in each row `(B, S)`: `(B,)`, S where there is none."""
    found = (input_ids == token_id).flip(1)
    return torch.where(found.any(1), found.long().argmax(1), input_ids.shape[1])


def sizes_in_prompts(vocabulary: dict[str, int], input_ids: Tensor) -> list[tuple[int, int]] | None:
    """Read the `height*width` that stands before the image tokens of each prompt `(B, S)`; None if one has none."""
    names = {token_id: name for name, token_id in vocabulary.items()}
    sizes = []
    for row in input_ids.tolist():
        text = "".join(names.get(token_id, " ") for token_id in row)
        stated = re.findall(rf"{re.escape(BEGIN_IMAGE)}(\d+)\*(\d+){re.escape(IMAGE_TOKENS)}", text)
        if not stated:
            return None
        sizes.append((int(stated[-1][0]), int(stated[-1][1])))
    return sizes


def recognise(ask: Callable[[int, Tensor], Sequence[int]], prompts: Tensor) -> Emu3ImageLayout | None:
    """Give the layout behind a `prefix_allowed_tokens_fn`, None when it may be anything.

    Args:
        ask: The function. Besides a layout itself, the helper that the processor published with Emu3 makes
            (`build_prefix_constrained_fn`) is known, by its attributes and by its answers at every kind of place.
        prompts: `(B, S)` int64. That helper counts from the first image of a prompt, so there must not be two.
    """
    if isinstance(ask, Emu3ImageLayout):
        return ask
    helper: Any = ask
    try:
        ids = [int(getattr(helper, f"{name}_token")) for name in ("img", "eol", "eof", "eoi", "eos", "pad")]
        sizes = zip(helper.height.tolist(), helper.width.tolist(), strict=True)
        layout = Emu3ImageLayout(tuple(sizes), list(helper.visual_tokens), ids[0], tuple(ids[1:5]), ids[5])  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError):
        return None
    single = bool(((prompts == layout.image_token_id).sum(1) == 1).all())
    return layout if single and _answers_alike(copy.deepcopy(helper), layout) else None


def _answers_alike(helper: Any, layout: Emu3ImageLayout) -> bool:
    """Whether a helper says what the layout says at the beginning and end of rows and of the image.

    It remembers where the image of a prompt began, so it is a copy that is asked, always about the same beginning.
    """
    for prompt, (height, width) in enumerate(layout.sizes):
        last = height * (width + 1)
        for place in (0, width - 1, width, width + 1, last - 1, last, last + 1, last + 2, last + 3):
            ids = torch.full((place + 1,), layout.visual_ids[0])
            ids[0] = layout.image_token_id
            if [int(token) for token in helper(prompt, ids)] != layout(prompt, ids):
                return False
    return True
