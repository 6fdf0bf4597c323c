"""A round waits for the device at most twice, whatever the tree and the batch.

No device is at hand, so what would wait is counted: reads of a tensor on the host, and operators whose result has a
size that depends on data. The target's own forward is left out of the count; it is transformers' code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import Case, make_case, oracle
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_hf import TREES, LanternConfig, NeighborTable

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy")
# Operators that look at data to know what to return; indexing with a bool tensor comes to aten.nonzero on a device.
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "_unique2", "equal", "item")


class Waits(TorchDispatchMode):
    """Counts what would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.paused = False

    def note(self, name: str) -> None:
        if not self.paused:
            self.names.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in WAITING:
            self.note(name)
        if name.startswith(("index", "_index_put")) and isinstance(args[1], list | tuple):
            masks = [index for index in args[1] if isinstance(index, torch.Tensor) and index.dtype == torch.bool]
            if masks:
                self.note("index with a bool tensor")
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, case: Case) -> Iterator[Waits]:
    """Count waits outside the target's forward."""
    waits = Waits()
    for name in READS:
        original = getattr(torch.Tensor, name)

        def read(self: Any, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            waits.note(_name)
            before, waits.paused = waits.paused, True  # a read is one wait, whatever it is made of
            try:
                return _original(self, *args, **kwargs)
            finally:
                waits.paused = before

        monkeypatch.setattr(torch.Tensor, name, read)
    base = case.model.base_model
    forward = base.forward

    def silent(*args: Any, **kwargs: Any) -> Any:
        before, waits.paused = waits.paused, True
        try:
            return forward(*args, **kwargs)
        finally:
            waits.paused = before

    monkeypatch.setattr(base, "forward", silent)
    with waits:
        yield waits


def waits_per_round(monkeypatch: pytest.MonkeyPatch, case: Case, assistant: Any, **kwargs: Any) -> list[list[str]]:
    """Names of the waits of every round after the first, which reads the prompt too."""
    rounds: list[list[str]] = []

    with monkeypatch.context() as patch:
        patch.setattr("lantern_hf.session.asking_is_free", lambda device: False)
        with counted(patch, case) as waits:

            def on_round(session: Any) -> None:
                rounds.append(list(waits.names))
                waits.names.clear()

            case.lantern(assistant, max_new_tokens=12, on_round=on_round, **kwargs)
    assert len(rounds) > 2
    return rounds[1:]


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("relaxed", [True, False])
@pytest.mark.parametrize("name", ["llamagen", "chameleon-image"])
def test_two_waits_at_most(
    name: str, relaxed: bool, do_sample: bool, neighbors: NeighborTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for rows in (1, 3):
        for tree in ("chain_5", "wide_57"):
            case = make_case(name, rows, 2.0)
            config = LanternConfig(tree, 5, lam=3.0) if relaxed else LanternConfig.strict(tree)
            kwargs: dict[str, Any] = {"neighbors": neighbors} if relaxed else {}
            kwargs |= {"top_k": 8} if do_sample else {}
            rounds = waits_per_round(
                monkeypatch, case, case.head(), do_sample=do_sample, lantern_config=config, **kwargs
            )
            assert max(len(names) for names in rounds) <= 2, rounds
            seen |= {len(names) for names in rounds}
    assert len(seen) == 1, seen  # neither the tree nor the batch changes it


def test_a_static_cache_and_ragged_rows_wait_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("llama", 3)
    expected = case.plain(do_sample=False, max_new_tokens=12)
    for kwargs in ({}, {"cache_implementation": "static"}):
        draft = oracle(case, expected, TREES["wide_57"], misses=0.3)
        draft.get_candidates = quiet(draft)  # it lives on the host
        rounds = waits_per_round(monkeypatch, case, draft, do_sample=False, **kwargs)
        assert max(len(names) for names in rounds) <= 2, rounds


def quiet(draft: Any) -> Any:
    """A generator whose own work is not counted."""
    original = draft.get_candidates

    def get_candidates(*args: Any, **kwargs: Any) -> Any:
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        before, mode.paused = mode.paused, True
        try:
            return original(*args, **kwargs)
        finally:
            mode.paused = before

    return get_candidates


def test_the_count_sees_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("llama")
    with monkeypatch.context() as patch, counted(patch, case) as waits:
        tensor = torch.tensor([1, 0, 2])
        bool(tensor.sum())
        int(tensor[0])
        tensor.tolist()
        tensor.nonzero()
        _ = tensor[tensor > 0]
        torch.where(tensor > 0, tensor, 0)
    assert waits.names == ["__bool__", "__int__", "tolist", "nonzero", "index with a bool tensor"]
