"""Static draft trees: which nodes are drafted, who their parents are, and the index tables a vectorised walk needs.

A tree is a fixed shape. It knows nothing of tokens, probabilities, models or caches; those are addressed by node id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lantern_hf._tree_presets import PRESETS

__all__ = ["MAX_CHOICES", "TREES", "DraftTree", "get_tree"]

MAX_CHOICES = 512
"""Most drafted nodes a tree may have. The pass over a tree is dense in its nodes, so larger ones only cost."""

Path = tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class DraftTree:
    """A static draft tree of N nodes with node 0, the root, being the last committed token.

    Nodes are numbered by (depth, path), so parents come before children and every depth is one run of ids. Equality and
    hash follow the shape and the rows, never the device. Build one with `from_choices`; do not call the constructor.

    Attributes:
        choices: Path of child ranks of each drafted node, in node order: node n is `choices[n - 1]`. `(0, 2)` is the
            third child of the first child of the root.
        parents: `(N,)` int64, parent of each node, -1 for the root.
        depths: `(N,)` int64, 0 for the root. Position of a node = prefix length + depth.
        mask: `(N, N)` bool, True where row i may attend to column j: j is i or an ancestor of i.
        paths: `(L, D + 1)` int64, node ids from the root to each leaf in path order, padded with -1.
        rows: `(N,)` int64, row of `draft_probs` that the node's token was drawn from, -1 for the root. By default the
            parent. Siblings that share a row were drawn from it without replacement, in rank order; siblings of
            different rows were drawn independently.
        children: `(N, R)` int64, child ids in rank order, padded with -1.
        inner: `(I,)` int64, ids of the nodes that have children.
        levels: D + 1 tensors, the node ids at each depth.
        widths: D integers, the most children that a node at each depth has.
    """

    choices: tuple[Path, ...]
    parents: Tensor
    depths: Tensor
    mask: Tensor
    paths: Tensor
    rows: Tensor
    children: Tensor
    inner: Tensor
    levels: tuple[Tensor, ...]
    widths: tuple[int, ...]
    _rows: tuple[int, ...]

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]], rows: Sequence[int] | None = None) -> DraftTree:
        """Build a tree from the rank paths of its nodes, given in any order.

        Args:
            choices: Rank paths, for example `[(0,), (1,), (0, 0)]`. Ranks of siblings count up from 0 without a gap,
                and the parent of every path is listed too.
            rows: Row of `draft_probs` per node in node order, root first (its entry is ignored), each in [0, N).
                Default: the node's parent.

        Returns:
            The tree, on the CPU.

        Raises:
            ValueError: The choices are empty, too many, duplicated, not ranks, lack a parent or skip a rank; or `rows`
                has the wrong length or range. The message names the first offending path.

        Example:
            >>> DraftTree.from_choices([(0,), (1,), (0, 0)]).parents.tolist()
            [-1, 0, 0, 1]
        """
        ordered = _checked_choices(choices)
        node_of = {(): 0, **{path: node for node, path in enumerate(ordered, start=1)}}
        parents = [-1] + [node_of[path[:-1]] for path in ordered]
        row_ids = parents if rows is None else _checked_rows(rows, len(parents))
        return cls(choices=ordered, _rows=tuple(row_ids), rows=torch.tensor(row_ids), **_index_tables(ordered, parents))

    @classmethod
    def root_only(cls) -> DraftTree:
        """Build the tree that drafts nothing: a target pass over it is one step of plain decoding."""
        return cls(choices=(), _rows=(-1,), rows=torch.tensor([-1]), **_index_tables((), [-1]))

    def grafted_on_chain(self, length: int) -> DraftTree:
        """Put this tree at the root of a chain that brings its own distributions, such as a drafted window.

        The chain is rank 0 at the root, so it is tested first, and this tree's children of the root follow with their
        ranks moved up by one. A chain node is drawn from the row of its own id, independently of everything else;
        this tree's nodes keep their rows.

        Args:
            length: Nodes in the chain, at least 1.

        Returns:
            A tree with `length` more nodes; `choices` of the chain are `(0,)`, `(0, 0)`, and so on.

        Raises:
            ValueError: `length` is below 1, or the result has too many nodes.
        """
        if not _is_int(length) or length < 1:
            raise ValueError(f"`length` of the chain must be a whole number of at least 1, got {length!r}.")
        moved = [(path[0] + 1, *path[1:]) for path in self.choices]
        whole = DraftTree.from_choices([(0,) * depth for depth in range(1, length + 1)] + moved)
        node_of = {path: node for node, path in enumerate(whole.choices, start=1)}
        new_id = [0] + [node_of[path] for path in moved]
        rows = list(range(whole.num_nodes))
        for node, row in zip(new_id[1:], self._rows[1:], strict=True):
            rows[node] = new_id[row]
        return DraftTree.from_choices(whole.choices, rows=rows)

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return len(self.choices) + 1

    @property
    def max_depth(self) -> int:
        """D, the depth of the deepest node; the most tokens one pass can keep without the bonus token."""
        return len(self.widths)

    @property
    def max_children(self) -> int:
        """R, the most children of any node."""
        return max(self.widths, default=0)

    @property
    def device(self) -> torch.device:
        """Where the index tables live."""
        return self.parents.device

    @property
    def has_default_rows(self) -> bool:
        """Whether every token is drawn from its parent's row, as a single head does it."""
        return self == DraftTree.from_choices(self.choices)

    def to(self, device: torch.device | str | int) -> DraftTree:
        """Return the tree with its index tables on `device`; itself when they are there already."""
        if torch.empty(0, device=device).device == self.device:
            return self
        tables: dict[str, Any] = dict(vars(self))
        moved = {name: value.to(device) for name, value in tables.items() if isinstance(value, Tensor)}
        return DraftTree(**{**tables, **moved, "levels": tuple(level.to(device) for level in self.levels)})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftTree):
            return NotImplemented
        return self.choices == other.choices and self._rows == other._rows

    def __hash__(self) -> int:
        return hash((self.choices, self._rows))

    def __repr__(self) -> str:
        counts = "/".join(str(len(level)) for level in self.levels[1:])
        return f"DraftTree({len(self.choices)} nodes and a root, {counts} per depth, {len(self.paths)} leaves)"


def get_tree(tree: str | DraftTree | Iterable[Sequence[int]]) -> DraftTree:
    """Turn a preset name or rank paths into a tree; a tree is returned as it is.

    Args:
        tree: Key of `TREES`, a `DraftTree`, or choices as `DraftTree.from_choices` takes them.

    Returns:
        The tree.

    Raises:
        ValueError: No preset has that name, or the choices are ill-formed.
    """
    if isinstance(tree, DraftTree):
        return tree
    if not isinstance(tree, str):
        return DraftTree.from_choices(tree)
    if tree not in TREES:
        raise ValueError(
            f"`tree` {tree!r} is not a preset. Use one of {', '.join(TREES)}, "
            "or pass choices such as [[0], [1], [0, 0]]."
        )
    return TREES[tree]


def _checked_choices(choices: Iterable[Sequence[int]]) -> tuple[Path, ...]:
    """Check rank paths and sort them into node order."""
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise ValueError(f"`choices` must be a list of rank paths, got {choices!r}. Example: [[0], [1], [0, 0]].")
    paths = [_checked_path(path) for path in choices]
    if not paths:
        raise ValueError("`choices` is empty; a tree needs at least one node. The smallest tree is [[0]].")
    if len(paths) > MAX_CHOICES:
        raise ValueError(
            f"`choices` has {len(paths)} nodes, at most {MAX_CHOICES} are allowed; the first too many is "
            f"{list(paths[MAX_CHOICES])}. Drop the deepest or last-ranked ones."
        )
    known: set[Path] = set()
    for path in sorted(paths, key=lambda path: (len(path), path)):
        _check_place(path, known)
        known.add(path)
    return tuple(sorted(known, key=lambda path: (len(path), path)))


def _checked_path(path: Sequence[int]) -> Path:
    """Check that one path is a non-empty sequence of ranks."""
    if (
        isinstance(path, str)
        or not isinstance(path, Sequence)
        or not path
        or not all(_is_int(r) and r >= 0 for r in path)
    ):
        raise ValueError(
            f"Path {path!r} in `choices` is not a list of child ranks: whole numbers from 0, at least one. "
            "Write the first child of the root as [0]; the root itself is not listed."
        )
    return tuple(path)


def _check_place(path: Path, known: set[Path]) -> None:
    """Check one path against the paths that come before it in node order."""
    if path in known:
        raise ValueError(f"Path {list(path)} is in `choices` twice; each node is listed once. Remove one of them.")
    if len(path) > 1 and path[:-1] not in known:
        raise ValueError(f"Path {list(path)} in `choices` has no parent; add {list(path[:-1])} or remove the path.")
    before = (*path[:-1], path[-1] - 1)
    if path[-1] > 0 and before not in known:
        raise ValueError(
            f"Path {list(path)} in `choices` skips a rank: siblings count up from 0 without a gap. "
            f"Add {list(before)} or lower the rank."
        )


def _checked_rows(rows: Sequence[int], num_nodes: int) -> list[int]:
    """Check the draft rows of a composed tree."""
    if len(rows) != num_nodes:
        raise ValueError(f"`rows` needs one entry per node, root included: {num_nodes}, got {len(rows)}.")
    for node, row in enumerate(rows):
        if node > 0 and not (_is_int(row) and 0 <= row < num_nodes):
            raise ValueError(f"`rows[{node}]` must be a row of `draft_probs` in [0, {num_nodes}), got {row!r}.")
    return [-1, *rows[1:]]


def _index_tables(choices: tuple[Path, ...], parents: list[int]) -> dict[str, Any]:
    """Compute every table that follows from the shape."""
    num_nodes = len(parents)
    depths = [0] + [len(path) for path in choices]
    children: list[list[int]] = [[] for _ in parents]
    ancestors = [[0]]
    for node in range(1, num_nodes):
        children[parents[node]].append(node)
        ancestors.append([*ancestors[parents[node]], node])
    mask = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
    for node, line in enumerate(ancestors):
        mask[node, line] = True
    leaves = sorted((n for n in range(1, num_nodes) if not children[n]), key=lambda n: choices[n - 1]) or [0]
    levels = [[n for n in range(num_nodes) if depths[n] == depth] for depth in range(max(depths) + 1)]
    return {
        "parents": torch.tensor(parents),
        "depths": torch.tensor(depths),
        "mask": mask,
        "paths": _padded([ancestors[leaf] for leaf in leaves]),
        "children": _padded(children),
        "inner": torch.tensor([n for n in range(num_nodes) if children[n]], dtype=torch.long),
        "levels": tuple(torch.tensor(level) for level in levels),
        "widths": tuple(max(len(children[n]) for n in level) for level in levels[:-1]),
    }


def _padded(lists: list[list[int]]) -> Tensor:
    """Stack lists of different lengths into one int64 table, padded with -1."""
    width = max(map(len, lists))
    return torch.tensor([line + [-1] * (width - len(line)) for line in lists], dtype=torch.long)


def _is_int(value: object) -> bool:
    """Whether a value is a whole number; `True` is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


TREES: dict[str, DraftTree] = {
    name: DraftTree.from_choices([tuple(map(int, word)) for word in words.split()]) for name, words in PRESETS.items()
}
"""Preset trees by name; the number in a name is the number of drafted nodes, the root excluded."""
