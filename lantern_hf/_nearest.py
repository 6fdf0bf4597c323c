"""Exact nearest neighbours of every row of a matrix, with all but doubtful cases decided by matrix products.

Knows numbers only. The product form of a distance, `|x|^2 - 2 x.y + |y|^2`, costs a thirtieth of the difference form on
wide rows, but rounds worse. Its error has a bound; where two distances lie closer than that, they are computed again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_ELEMENTS = 2**22  # float64 numbers held at a time: 32 MiB, and a few copies of it
_SPARE = 32  # candidates beyond k, among which a run of equal distances may end


def nearest_rows(points: Tensor, k: int) -> Tensor:
    """Find the k nearest other rows of every row.

    Args:
        points: `(K, C)` float64, finite.
        k: Neighbours, in [1, K - 1].

    Returns:
        `(K, k)` int32, in the order of the squared distance as `(x - y).square().sum()` gives it in float64, then of
        the index. Memory is bounded by chunks of rows, whatever K is.
    """
    squares = points.square().sum(1)
    step = max(1, _ELEMENTS // len(points))
    chunks = [
        _chunk(points, squares, start, min(start + step, len(points)), k) for start in range(0, len(points), step)
    ]
    return torch.cat(chunks)


def _chunk(points: Tensor, squares: Tensor, start: int, stop: int, k: int) -> Tensor:
    """Neighbours of the rows `start` to `stop`, `(stop - start, k)`."""
    others, width = len(points) - 1, min(k + _SPARE, len(points) - 1)
    rows = torch.arange(stop - start, device=points.device)
    # Without |x|^2, which is the same for all of a row.
    scores = torch.addmm(squares, points[start:stop], points.T, alpha=-2)
    scores[rows, rows + start] = torch.inf
    values, indices = scores.topk(width, dim=1, largest=False, sorted=True)
    values += squares[start:stop, None]
    doubt = 2 * _error(points, squares, start, stop)
    close = values.diff(dim=1) <= doubt[:, None]
    _settle(points, points[start:stop], values, indices, pad(close, (1, 0)) | pad(close, (0, 1)))
    if width < others:
        # Equal distances up to the last candidate may go on behind it.
        for row in close[:, k - 1 :].all(1).nonzero().flatten().tolist():
            indices[row, :k] = _by_differences(points, scores[row], start + row, k, doubt[row])
    return indices[:, :k].to(torch.int32)


def _error(points: Tensor, squares: Tensor, start: int, stop: int) -> Tensor:
    """Bound of the error of both forms of a squared distance, `(stop - start,)`.

    Twice the usual bound of a dot product of C terms, applied to (|x| + |y|)^2 (Higham 2002, section 3.1).
    """
    size = squares[start:stop].sqrt() + squares.max().sqrt()
    return (points.shape[1] + 8) * torch.finfo(points.dtype).eps * size.square()


def _settle(points: Tensor, rows: Tensor, values: Tensor, indices: Tensor, doubtful: Tensor) -> None:
    """Put the doubtful candidates of each row, `(n, width)` bool, in their true order, in place."""
    pairs = doubtful.nonzero()
    if not len(pairs):
        return
    for row, column in (part.T for part in pairs.split(_split(points))):
        values[row, column] = (rows[row] - points[indices[row, column]]).square().sum(1)
    touched = doubtful.any(1).nonzero().flatten()
    by_index = indices[touched].sort(dim=1)
    order = values[touched].gather(1, by_index.indices).sort(dim=1, stable=True).indices
    indices[touched] = by_index.values.gather(1, order)


def _by_differences(points: Tensor, scores: Tensor, row: int, k: int, doubt: Tensor) -> Tensor:
    """Neighbours of one row, `(k,)`, by the difference form against all that its scores `(K,)` leave in doubt."""
    near = (scores <= scores.kthvalue(k).values + doubt).nonzero().flatten()
    distances = [(points[part] - points[row]).square().sum(1) for part in near.split(_split(points))]
    return near[torch.cat(distances).sort(stable=True).indices[:k]]


def _split(points: Tensor) -> int:
    """Rows whose numbers may be copied at a time."""
    return max(1, _ELEMENTS // points.shape[1])
