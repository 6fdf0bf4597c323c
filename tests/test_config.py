"""`LanternConfig`: defaults, checks at construction, and the way through JSON and a `GenerationConfig`."""

from __future__ import annotations

import json

import pytest
from transformers import GenerationConfig

from lantern_hf.config import LanternConfig
from lantern_hf.tree import TREES, DraftTree


def test_defaults_are_lantern_plus_plus() -> None:
    config = LanternConfig()
    assert (config.neighborhood_size, config.lam, config.delta, config.residual) == (10, 2.0, None, "strict")
    assert config.draft_tree is TREES[config.tree]
    assert not config.is_strict


def test_delta_alone_is_lantern() -> None:
    config = LanternConfig(delta=0.2)
    assert (config.lam, config.delta) == (None, 0.2)
    assert config.relaxation.delta == 0.2


@pytest.mark.parametrize(
    "config",
    [LanternConfig.strict(), LanternConfig(lam=1), LanternConfig(delta=0), LanternConfig(neighborhood_size=0)],
)
def test_strict_settings(config: LanternConfig) -> None:
    assert config.is_strict
    assert LanternConfig.strict("chain_5").tree == "chain_5"


@pytest.mark.parametrize("tree", ["narrow_8", [[0], [1], [0, 0]], ((0,),), TREES["wide_57"]])
def test_survives_json(tree) -> None:
    for config in (LanternConfig(tree, 5, lam=3), LanternConfig(tree, delta=0.1, residual="reference")):
        assert LanternConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert hash(config) == hash(LanternConfig.resolve(config.to_dict()))


def test_survives_a_generation_config() -> None:
    config = LanternConfig([[0], [1]], delta=0.3)
    text = GenerationConfig(lantern_config=config).to_json_string(use_diff=False)
    assert LanternConfig.resolve(json.loads(text)["lantern_config"]) == config


def test_resolve() -> None:
    config = LanternConfig(lam=3.0)
    assert LanternConfig.resolve(config) is config
    assert LanternConfig.resolve(None) == LanternConfig()
    assert LanternConfig.resolve({"lam": 3.0}) == config
    with pytest.raises(ValueError, match="LanternConfig, a dict of its settings or None, got float"):
        LanternConfig.resolve(2.0)


def test_keys_of_a_later_release_are_dropped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="does not know 'window'.*Known keys"):
        config = LanternConfig.from_dict({"lam": 3.0, "window": 16})
    assert config == LanternConfig(lam=3.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lam": 0.9}, "`lam` must be a finite number of at least 1, got 0.9.*`delta`"),
        ({"lam": float("inf")}, "got inf"),
        ({"lam": float("nan")}, "got nan"),
        ({"lam": "2"}, "got '2'"),
        ({"lam": True}, "got True"),
        ({"delta": -0.1}, r"`delta` must be a number in \[0, 1\], got -0.1"),
        ({"delta": 2.0}, "got 2.0.*`lam`"),
        ({"lam": 2.0, "delta": 0.1}, "lam=2.0 and delta=0.1. Set one"),
        ({"neighborhood_size": -1}, "`neighborhood_size` must be a whole number of at least 0, got -1"),
        ({"neighborhood_size": 1.5}, "got 1.5"),
        ({"residual": "paper"}, "'strict', 'reference', got 'paper'"),
        ({"tree": "eagle"}, "not a preset. Use one of chain_5"),
        ({"tree": [[1]]}, "skips a rank"),
    ],
)
def test_wrong_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LanternConfig(**settings)


def test_a_composed_tree_does_not_fit_a_config() -> None:
    with pytest.raises(ValueError, match="composed"):
        LanternConfig(DraftTree.from_choices([(0,), (1,)]).grafted_on_chain(2))
