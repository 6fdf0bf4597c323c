"""Images of any size and mode to what a VQ encoder reads, and codes to the tokens that a target would generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from torch import Tensor

__all__ = ["fit_image", "flatten_image", "lay_out", "to_pixels"]


def flatten_image(image: PIL.Image.Image) -> PIL.Image.Image:
    """Give an image in RGB, over white where it is transparent."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def fit_image(image: PIL.Image.Image, width: int, height: int) -> PIL.Image.Image:
    """Scale an image to cover `width` x `height` pixels and cut what stands over, the same on both sides."""
    flat = PIL.ImageOps.exif_transpose(flatten_image(image))
    return PIL.ImageOps.fit(flat, (width, height), PIL.Image.Resampling.LANCZOS)


def to_pixels(images: Sequence[PIL.Image.Image], image_processor: Any = None) -> Tensor:
    """Turn images of one size into what the VQ encoder reads.

    Args:
        images: RGB images of one size.
        image_processor: The target's, whose scale, mean and deviation are used; None is the usual [-1, 1].

    Returns:
        `(B, 3, H, W)` float32.
    """
    pixels = torch.stack([torch.from_numpy(np.asarray(image).copy()) for image in images]).permute(0, 3, 1, 2).float()
    mean, deviation = (getattr(image_processor, name, None) for name in ("image_mean", "image_std"))
    if mean is None or deviation is None:
        return pixels / 127.5 - 1
    mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in (mean, deviation))
    return (pixels * image_processor.rescale_factor - mean) / deviation


def lay_out(forced: Tensor, token_ids: Tensor) -> Tensor:
    """Put the tokens of codes where an image has them, and what must come between them.

    Args:
        forced: Id that must come at each place of the image, `(T,)` int64; -1 where a code comes, in n places.
        token_ids: Tokens of the codes in raster order, `(B, n)` int64.

    Returns:
        `(B, T)` int64.

    Example:
        >>> lay_out(torch.tensor([-1, -1, 9, -1, -1, 9]), torch.tensor([[1, 2, 3, 4]])).tolist()
        [[1, 2, 9, 3, 4, 9]]
    """
    tokens = forced.repeat(len(token_ids), 1)
    tokens[:, forced < 0] = token_ids
    return tokens
