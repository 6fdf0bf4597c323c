"""Exact nearest neighbours of every row of a matrix, with all but doubtful cases decided by matrix products.

Knows numbers only. The product form of a distance, `|x|^2 - 2 x.y + |y|^2`, costs a thirtieth of the difference form on
wide rows, but rounds worse. Its error has a bound; where two distances lie closer than that, they are computed again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

_ELEMENTS = 2**22  # float64 numbers held at a time: 32 MiB, and a few copies of it
_SPARE = 32  # candidates beyond k, among which a run of equal distances may end
_BLOCK = 8  # rows a thread selects from at a time, few enough to stay in its cache


def nearest_rows(points: Tensor, k: int) -> Tensor:
    """Find the k nearest other rows of every row.

    Args:
        points: `(K, C)` float64, finite.
        k: Neighbours, in [1, K - 1].

    Returns:
        `(K, k)` int32, in the order of the squared distance as `(x - y).square().sum()` gives it in float64, then of
        the index. Memory is bounded by chunks of rows, whatever K is.
    """
    count, squares = len(points), points.square().sum(1)
    step = min(max(1, _ELEMENTS // count), count)
    # One buffer for all chunks: memory that is new to the process costs as much as the product of narrow rows.
    scores = points.new_empty(step, count)
    nearest = torch.empty(count, k, dtype=torch.int32, device=points.device)
    for start in range(0, count, step):
        stop = min(start + step, count)
        nearest[start:stop] = _chunk(points, squares, start, stop, k, scores[: stop - start])
    return nearest


def _chunk(points: Tensor, squares: Tensor, start: int, stop: int, k: int, scores: Tensor) -> Tensor:
    """Neighbours of the rows `start` to `stop`, `(stop - start, k)`; `scores` `(stop - start, K)` is overwritten."""
    others, width = len(points) - 1, min(k + _SPARE, len(points) - 1)
    rows = torch.arange(stop - start, device=points.device)
    # Without |x|^2, which is the same for all of a row.
    torch.addmm(squares, points[start:stop], points.T, alpha=-2, out=scores)
    scores[rows, rows + start] = torch.inf
    values, indices = _smallest(scores, width)
    values += squares[start:stop, None]
    doubt = 2 * _error(points, squares, start, stop)
    close = values.diff(dim=1) <= doubt[:, None]
    _settle(points, points[start:stop], values, indices, pad(close, (1, 0)) | pad(close, (0, 1)))
    if width < others:
        # Equal distances up to the last candidate may go on behind it.
        for row in close[:, k - 1 :].all(1).nonzero().flatten().tolist():
            indices[row, :k] = _by_differences(points, scores[row], start + row, k, doubt[row])
    return indices[:, :k]


def _smallest(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Scores and columns of the `width` least of each row, in order of the score, `(n, width)` each."""
    if scores.device.type != "cpu":
        found = scores.topk(width, dim=1, largest=False, sorted=True)
        return found.values, found.indices
    # numpy's selection and sort use vector instructions; torch's `topk` took three quarters of the whole time
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        blocks = list(threads.map(partial(_smallest_of_block, width=width), scores.split(_BLOCK)))
    values, columns = zip(*blocks, strict=True)
    return torch.cat(values), torch.cat(columns)


def _smallest_of_block(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`_smallest` of a few rows on the CPU, by one thread."""
    all_values = scores.numpy()
    columns = np.argpartition(all_values, width - 1, axis=1)[:, :width]
    values = np.take_along_axis(all_values, columns, axis=1)
    order = values.argsort(axis=1)
    sorted_values, sorted_columns = (np.take_along_axis(part, order, axis=1) for part in (values, columns))
    return torch.from_numpy(sorted_values), torch.from_numpy(sorted_columns)


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
