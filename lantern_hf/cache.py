"""Keys and values of rows that grow at different speeds: keep an accepted path, drop the rest of the tree.

The only file that knows how transformers stores keys and values, and under which keyword a forward takes them. It knows
no model, tree or token. Every layer of a cache is written at one common offset by `Cache.update`; `RaggedCache` then
moves what each row keeps down to its own length, so that rows need no holes and positions are never rotated again.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer
from transformers.masking_utils import create_causal_mask

from lantern_hf._host import on_device

CACHE_KEYWORD = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
"""Keyword of model forwards and of `generate` that takes the cache, and field of outputs that holds it.

`past_key_values` before transformers 5.24.
"""


def check_cache(cache: Cache) -> None:
    """Refuse a cache that cannot keep a path.

    Args:
        cache: The cache a user passed, or one that `generate` made.

    Raises:
        ValueError: A layer slides, is quantised, linear or otherwise not a plain dynamic or static one, or is
            offloaded.
    """
    if getattr(cache, "offloading", False):
        raise ValueError(
            "An offloaded cache cannot keep an arbitrary path of cached positions. Leave `cache_implementation` out, "
            "set it to 'static', or decode without LANTERN."
        )
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, StaticLayer):
            raise ValueError(
                f"Layer {index} of the cache is a {type(layer).__name__}, but tree decoding keeps an arbitrary path of "
                "cached positions, which only DynamicLayer and StaticLayer allow. Pass a DynamicCache or StaticCache, "
                "or decode without LANTERN."
            )


class RaggedCache:
    """A transformers cache whose rows have lengths of their own.

    Args:
        cache: The cache, holding `width` slots of every row.
        rows: Number of rows R.
        device: Where masks are made.
        width: Slots written so far.
        padding: `(R, P)` bool, True where one of the first P slots holds or will hold padding; None when none does.

    Attributes:
        lengths: `(R,)` int64, slots in use per row, padding included.
        width: The longest row. The next pass writes from there.
    """

    def __init__(self, cache: Cache, rows: int, device: torch.device, width: int = 0, padding: Tensor | None = None):
        self.cache = cache
        self.width = width
        self.lengths = torch.full((rows,), width, device=device)
        self._padding = None if padding is None or not bool(padding.any()) else padding.to(device)
        self._host_lengths = [width] * rows
        # Masks, `(rows, 1, nodes, slots)`: slots below `_settled` never change again, none from `_written` on was used.
        self._buffer = torch.zeros(0, 1, 0, 0, dtype=torch.bool, device=device)
        self._settled = self._written = 0

    @property
    def is_uniform(self) -> bool:
        """Whether every row holds the same slots, none of them padding."""
        return self._padding is None and len(set(self._host_lengths)) == 1

    @property
    def total(self) -> int | None:
        """Fixed number of slots of a static cache, None for a dynamic one."""
        first = self.cache.layers[0]
        return first.max_cache_len if isinstance(first, StaticLayer) else None

    def tree_mask(self, new_mask: Tensor) -> Tensor | None:
        """Say which slots new nodes may attend to: all that their row has kept, and newer ones as `new_mask` allows.

        Every mask is a window of one buffer, in which a call writes the slots that are new since the last one: its work
        grows with the tree, not with the sequence. A mask therefore holds until the next call.

        Args:
            new_mask: Bool, `(N, M)` for all rows or `(R, N, M)`: which of the M slots after the kept ones each of the N
                new nodes attends to. M is N, or more when nodes of the same tree were written before.

        Returns:
            `(R or 1, 1, N, total)` bool; None when a single new node may see everything there is.
        """
        nodes, slots = new_mask.shape[-2:]
        if slots == 1 and self.is_uniform and self.total is None:
            return None
        rows = 1 if self.is_uniform and new_mask.ndim == 2 else len(self._host_lengths)
        end, total = self.width + slots, self.total
        if not self.width:  # a prompt, whose mask is large and needed once
            mask = new_mask.expand(rows, -1, -1)[:, None]
            return mask if total is None else torch.nn.functional.pad(mask, (0, total - end))
        self._refresh_buffer(rows, nodes, end if total is None else total)
        window = self._buffer[:rows, :, :nodes, : end if total is None else total]
        window[:, 0, :, self.width : end] = new_mask
        window[..., end : self._written] = False  # a larger tree may have stood there; a dynamic cache ends before it
        self._written = max(self._written, end)
        return window

    def _refresh_buffer(self, rows: int, nodes: int, slots: int) -> None:
        """Make room for a mask, and write which slots were kept since the last one."""
        held = self._buffer.shape
        if rows > held[0] or nodes > held[2] or slots > held[3]:
            wanted = held[3] if slots <= held[3] else slots if self.total is not None else 2 * slots
            shape = (max(rows, held[0]), 1, max(nodes, held[2]), wanted)
            self._buffer, self._settled = torch.zeros(shape, dtype=torch.bool, device=self.lengths.device), 0
        kept = self._valid_slots(self._settled)[: len(self._buffer)]
        self._buffer[:, 0, :, self._settled : self.width] = kept[:, None]
        self._settled = min(self._host_lengths)  # from there on a shorter row may still gain a slot

    def _valid_slots(self, first: int) -> Tensor:
        """`(R, width - first)` bool, True for the slots a row has kept, from the slot `first` on."""
        valid = torch.arange(first, self.width, device=self.lengths.device) < self.lengths[:, None]
        if self._padding is not None:
            padding = self._padding[:, first : self.width]
            valid[:, : padding.shape[1]] &= ~padding
        return valid

    def keep(self, nodes: Tensor, counts: list[int]) -> None:
        """Keep the first nodes of a path in each row and drop everything else the last pass wrote.

        Args:
            nodes: `(R, A)` int64, index of each kept node among the new ones, anything past the row's count; `(1, A)`
                when all rows keep the same.
            counts: Nodes kept per row, each at most A. Known on the host, so that nothing here waits for the device.
        """
        longest, old_width = max(counts), self.width
        uniform = len(set(counts)) == 1 and len(set(self._host_lengths)) == 1 and nodes.shape[0] == 1
        destination = None if uniform else self.lengths[:, None] + torch.arange(longest, device=self.lengths.device)
        self._host_lengths = [old + new for old, new in zip(self._host_lengths, counts, strict=True)]
        self.lengths = self.lengths + on_device(counts, self.lengths.device)
        self.width = max(self._host_lengths)
        source = nodes[:, :longest].clamp_min(0) + old_width
        for layer in self.cache.layers:
            _move_path(layer, source, destination, old_width, longest)
            _set_length(layer, self.width)

    def drop_new(self) -> None:
        """Drop everything written since the last `keep`."""
        for layer in self.cache.layers:
            _set_length(layer, self.width)


def _move_path(layer: Any, source: Tensor, destination: Tensor | None, offset: int, count: int) -> None:
    """Copy the slots `source` to `destination`, or to `offset ..` in every row alike."""
    if not count:
        return
    for name in ("keys", "values"):
        states = getattr(layer, name)  # (R, heads, slots, head_dim)
        index = source.to(states.device)
        if destination is None:
            # Gathered before it is written, since a path may move onto slots it is read from.
            states[:, :, offset : offset + count] = states.index_select(2, index[0])
            continue
        shape = (-1, states.shape[1], -1, states.shape[3])
        kept = states.gather(2, index[:, None, :, None].expand(states.shape[0], *shape[1:]))
        states.scatter_(2, destination.to(states.device)[:, None, :, None].expand(shape), kept)


def _set_length(layer: Any, length: int) -> None:
    """Forget every slot from `length` on."""
    if isinstance(layer, StaticLayer):
        layer.cumulative_length.fill_(length)
    else:
        layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


def mark_users_cache(given: Cache | None, implementation: str | None) -> Cache | None:
    """Mark a cache that a user passed, as newer releases of transformers do themselves; gives it back.

    What `generate` makes is empty, and static only if asked. An empty dynamic cache may be either; it is used as it is.

    Args:
        given: What a call holds under `CACHE_KEYWORD`.
        implementation: Its `cache_implementation`.
    """
    if given is not None:
        static = bool(given.layers) and isinstance(given.layers[0], StaticLayer)
        if (static and implementation is None) or int(given.get_seq_length()):
            given._is_user_defined = True  # type: ignore[attr-defined]
    return given


def decoding_cache(given: Cache | None, config: Any, *, slots: int, guided: bool) -> tuple[Cache, bool]:
    """Choose the cache of a generation.

    Args:
        given: The cache a user passed or `generate` made, None for the default.
        config: Text configuration of the model.
        slots: Slots that the longest row may come to need, the last tree included.
        guided: Whether an unconditional stream doubles the rows.

    Returns:
        The cache, empty, and whether the prompt can be read straight into it.

    Raises:
        ValueError: The user's cache holds tokens, is too small, has the wrong rows or cannot keep a path.
    """
    if given is None:
        given = DynamicCache(config=config)
    check_cache(given)
    own = getattr(given, "_is_user_defined", False)
    if own and int(given.get_seq_length()):
        raise ValueError(
            f"`{CACHE_KEYWORD}` holds {int(given.get_seq_length())} tokens. Drafting needs the target's states of the "
            "whole prompt, which a cache does not hold; pass an empty cache, or none, and the whole prompt."
        )
    if own and guided:
        raise ValueError(
            f"`{CACHE_KEYWORD}` cannot be passed together with guidance, whose two streams need a cache of twice the "
            "rows. Leave it out, or set `cache_implementation='static'` for a static one."
        )
    first = given.layers[0] if given.layers else None
    if not isinstance(first, StaticLayer):
        return (DynamicCache(config=config), False) if guided else (given, True)
    if own and first.max_cache_len < slots:
        raise ValueError(
            f"The StaticCache has {first.max_cache_len} slots, but prompt, new tokens and one tree need "
            f"{slots}. Make it with max_cache_len={slots}, or set `cache_implementation='static'` instead."
        )
    return (given if own else StaticCache(config=config, max_cache_len=slots)), False


def merge_streams(streams: list[Cache], widths: list[int], into: Cache) -> None:
    """Stack the prefilled caches of several streams into an empty one, shorter ones padded on the left.

    Args:
        streams: One dynamic cache per stream, prefilled with `widths` slots.
        widths: Slots in each.
        into: Takes the rows of all streams, in order, `max(widths)` slots each.
    """
    for index, layers in enumerate(zip(*(stream.layers for stream in streams), strict=True)):
        keys = torch.cat([_pad_left(layer.keys, max(widths)) for layer in layers])
        values = torch.cat([_pad_left(layer.values, max(widths)) for layer in layers])
        into.update(keys, values, index)


def _pad_left(states: Tensor, width: int) -> Tensor:
    """Pad `(R, heads, slots, head_dim)` with empty slots in front."""
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))


def new_dynamic_cache(config: Any) -> DynamicCache:
    """Make an empty dynamic cache for a model of this text configuration."""
    return DynamicCache(config=config)
