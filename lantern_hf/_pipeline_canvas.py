"""The images of one call of `LanternPipeline`, from tokens to codes to pixels, finished or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lantern_hf.sequences import Sequences
from lantern_hf.targets import adapter_for

MISSING = -1
"""Among codes: one that is not decoded yet."""


class Canvas:
    """The images that a call asks for.

    Args:
        model: The target.
        arguments: Arguments of `generate`, as `image_arguments` makes them.
        vq_model: Decoder of pixels, for families whose model has none.
        options: `target_options`.

    Attributes:
        sizes: Height and width of each image in codes.
        num_tokens: Tokens of the longest image.
    """

    def __init__(self, model: Any, arguments: Mapping[str, Any], vq_model: Any, options: Mapping[str, Any]):
        ids = arguments["input_ids"]
        self._adapter = adapter_for(model, ids, **options)
        self._adapter.read_call(ids, dict(arguments))
        self._vq_model = vq_model
        self._prompt_length = ids.shape[1] if self._adapter.returns_prompt else 0
        self.sizes = self._adapter.image_sizes(ids)
        self.num_tokens: int = arguments["max_new_tokens"]

    def finished(self, sequences: Tensor) -> list[Tensor]:
        """Codes of each image, `(h, w)` int64, from what `generate` returned.

        Raises:
            ValueError: An image is not complete.
        """
        rows = self._adapter.image_codes(sequences[:, self._prompt_length :])
        if unfinished := [row for row, images in enumerate(rows) if not images]:
            raise ValueError(
                f"{len(unfinished)} of {len(rows)} images are not complete: the model's generation config ends "
                "sequences early. Take its stopping settings out."
            )
        return [images[0] for images in rows]

    def unfinished(self, sequences: Sequences) -> Tensor:
        """Codes so far, `(B, L)` int64 in raster order for L codes of the largest image, `MISSING` where none is."""
        longest = max(height * width for height, width in self.sizes)
        codes = torch.full((len(self.sizes), longest), MISSING, device=sequences.device)
        for row in range(len(self.sizes)):
            found = self._adapter.codes_so_far(sequences.row(row)[sequences.prompt_length :], row)
            codes[row, : len(found)] = found
        return codes

    def filled(self, codes: Tensor) -> list[Tensor]:
        """Make images `(h, w)` of codes so far, the missing ones as the commonest of their image."""
        images = []
        for row, (height, width) in zip(codes, self.sizes, strict=True):
            known = row[row != MISSING]
            filler = known.mode().values if len(known) else torch.zeros_like(row[0])
            images.append(torch.where(row == MISSING, filler, row)[: height * width].view(height, width))
        return images

    def draw(self, codes: Sequence[Tensor], image_processor: Any, output_type: str) -> Any:
        """Turn images of codes into what the user wants: the codes, an array, a tensor or PIL images.

        Images of one size are decoded together; codes and tensors come as a list where sizes differ.
        """
        together = len(set(self.sizes)) == 1
        if output_type == "latent":
            return torch.stack(list(codes)) if together else list(codes)
        batches = [torch.stack(list(codes))] if together else [one[None] for one in codes]
        drawn = [
            image_processor.postprocess(self._adapter.pixels(batch, self._vq_model), output_type=output_type)
            for batch in batches
        ]
        return drawn[0] if together else [image for (image,) in drawn]
