"""Trees against the published buffers, composition, and errors that name the offending path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lantern_hf.tree import MAX_CHOICES, TREES, DraftTree, get_tree

PUBLISHED = json.loads((Path(__file__).parent / "golden" / "trees.json").read_text())
OUR_NAMES = {
    "chain": "chain_5",
    "mc_sim_7b_63": "eagle_25",
    "mc_sim_7b_63_balanced": "balanced_25",
    "reverse_balanced_25": "deep_25",
    "naive_extend_57": "wide_57",
    "medusa_2_7b_63": "medusa_63",
}
SMALL = DraftTree.from_choices([(0,), (1,), (0, 0)])


def test_small_tree_by_hand() -> None:
    assert SMALL.choices == ((0,), (1,), (0, 0))
    assert SMALL.parents.tolist() == [-1, 0, 0, 1]
    assert SMALL.rows.tolist() == [-1, 0, 0, 1]
    assert SMALL.depths.tolist() == [0, 1, 1, 2]
    assert SMALL.mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert SMALL.paths.tolist() == [[0, 1, 3], [0, 2, -1]]
    assert SMALL.children.tolist() == [[1, 2], [3, -1], [-1, -1], [-1, -1]]
    assert SMALL.inner.tolist() == [0, 1]
    assert [level.tolist() for level in SMALL.levels] == [[0], [1, 2], [3]]
    assert (SMALL.num_nodes, SMALL.max_depth, SMALL.max_children, SMALL.widths) == (4, 2, 2, (2, 1))
    assert repr(SMALL) == "DraftTree(3 nodes and a root, 2/1 per depth, 2 leaves)"


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_equal_the_published_buffers(name: str) -> None:
    tree, published = TREES[OUR_NAMES[name]], PUBLISHED[name]
    assert [list(path) for path in tree.choices] == published["choices"]
    assert tree.depths.tolist() == published["depth_of_node"]
    assert [row.nonzero().flatten().tolist() for row in tree.mask] == published["ancestors_of_node"]
    assert [[n for n in path if n >= 0] for path in tree.paths.tolist()] == published["root_to_leaf_paths"]


@pytest.mark.parametrize("name", TREES)
def test_names_state_the_number_of_drafted_nodes(name: str) -> None:
    tree = TREES[name]
    assert len(tree.choices) == int(name.rsplit("_", 1)[1]) == tree.num_nodes - 1
    assert tree.has_default_rows
    assert tree == DraftTree.from_choices(reversed(tree.choices))


def test_index_tables_agree_with_each_other() -> None:
    for tree in TREES.values():
        assert torch.equal(tree.mask.sum(1), tree.depths + 1)
        assert torch.cat(tree.levels).tolist() == list(range(tree.num_nodes))
        assert (tree.parents[1:] < torch.arange(1, tree.num_nodes)).all()
        for node in range(tree.num_nodes):
            children = [c for c in tree.children[node].tolist() if c >= 0]
            assert all(tree.parents[c] == node for c in children)
            assert bool(children) == (node in tree.inner.tolist())
            assert [tree.choices[c - 1][-1] for c in children] == list(range(len(children)))


def test_equality_and_hash_follow_shape_and_rows() -> None:
    same = DraftTree.from_choices([[0, 0], [1], [0]])
    assert same == SMALL
    assert len({same, SMALL}) == 1
    assert DraftTree.from_choices(SMALL.choices, rows=[0, 0, 2, 1]) != SMALL
    assert SMALL != "chain_5"


def test_to_device_moves_every_table() -> None:
    assert SMALL.to("cpu") is SMALL
    moved = SMALL.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert {t.device.type for t in [*tensors, *moved.levels]} == {"meta"}
    assert len(tensors) == 7
    assert moved == SMALL
    assert moved.device.type == "meta"


def test_rows_of_a_composed_tree() -> None:
    tree = SMALL.grafted_on_chain(3)
    assert tree.choices == ((0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0))
    # nodes:              root, chain, head, head, chain, head, chain
    assert tree.rows.tolist() == [-1, 1, 0, 0, 4, 2, 6]
    assert not tree.has_default_rows
    again = tree.grafted_on_chain(1)
    assert again.choices == ((0,), (1,), (2,), (3,), (1, 0), (2, 0), (1, 0, 0))
    assert again.rows.tolist() == [-1, 1, 2, 0, 0, 5, 3, 7]


@pytest.mark.parametrize("length", [0, -1, 1.5, True])
def test_chain_length_is_checked(length) -> None:
    with pytest.raises(ValueError, match="at least 1, got"):
        SMALL.grafted_on_chain(length)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "empty"),
        ([[1]], r"Path \[1\] .* skips a rank.* Add \[0\]"),
        ([[0], [0, 0], [0, 2]], r"Path \[0, 2\] .* skips a rank.* Add \[0, 1\]"),
        ([[0], [0]], r"Path \[0\] .* twice"),
        ([[0], [1, 0]], r"Path \[1, 0\] .* no parent; add \[1\]"),
        ([[0], [-1]], r"Path \[-1\] .* whole numbers from 0"),
        ([[0], [0.0]], r"Path \[0.0\] .* whole numbers"),
        ([[0], [True]], r"Path \[True\] .* whole numbers"),
        ([[0], []], r"Path \[\] .* the root itself is not listed"),
        ([[0], 1], "Path 1 "),
        ("00", "list of rank paths"),
        (7, "list of rank paths, got 7"),
        ([[rank] for rank in range(MAX_CHOICES + 1)], r"has 513 nodes, at most 512 .*\[512\]"),
    ],
)
def test_ill_formed_choices_are_named(choices, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree.from_choices(choices)


def test_ill_formed_rows_are_named() -> None:
    with pytest.raises(ValueError, match="root included: 4, got 2"):
        DraftTree.from_choices(SMALL.choices, rows=[0, 0])
    with pytest.raises(ValueError, match=r"`rows\[3\]` must be .* in \[0, 4\), got 4"):
        DraftTree.from_choices(SMALL.choices, rows=[0, 0, 0, 4])


def test_get_tree_takes_names_choices_and_trees() -> None:
    assert get_tree("eagle_25") is TREES["eagle_25"]
    assert get_tree(SMALL) is SMALL
    assert get_tree([[0], [1], [0, 0]]) == SMALL
    with pytest.raises(ValueError, match="'eagle_26' is not a preset. Use one of chain_5, eagle_25"):
        get_tree("eagle_26")
