"""Which adapters there are: those of this package, those registered by a program, those of installed packages."""

from __future__ import annotations

from importlib.metadata import entry_points

from transformers.utils import logging

from lantern_hf.targets.base import TargetAdapter
from lantern_hf.targets.causal_lm import CausalLMAdapter
from lantern_hf.targets.chameleon import ChameleonAdapter
from lantern_hf.targets.emu3 import Emu3Adapter
from lantern_hf.targets.glm_image import GlmImageAdapter
from lantern_hf.targets.janus import JanusAdapter
from lantern_hf.targets.llamagen import LlamaGenAdapter
from lantern_hf.targets.lumina_mgpt import LuminaAdapter

logger = logging.get_logger(__name__)

ENTRY_POINTS = "lantern_hf.targets"
"""Entry-point group in which an installed package names its adapter classes."""

# The first that matches serves, so a family that narrows another comes before it.
BUILT_IN: tuple[type[TargetAdapter], ...] = (
    LlamaGenAdapter,
    LuminaAdapter,
    ChameleonAdapter,
    Emu3Adapter,
    JanusAdapter,
    GlmImageAdapter,
)

_registered: list[type[TargetAdapter]] = []
_loaded: set[str] = set()


def register_target(adapter: type[TargetAdapter]) -> type[TargetAdapter]:
    """Let a family of targets be served; usable as a class decorator.

    A registered adapter is asked before those of this package, the last registered one first, so that it may narrow or
    replace one of them. A package that is installed can name its adapter in its metadata instead, and needs no import:
    `[project.entry-points."lantern_hf.targets"]` with a line `my_family = "my_package.adapter:MyAdapter"`.

    Args:
        adapter: Subclass of `TargetAdapter` with a `family` name. Registering one again changes nothing.

    Returns:
        The class itself.

    Raises:
        TypeError: It is no subclass of `TargetAdapter`.
        ValueError: It has no family name, or another registered class has that name.
    """
    if not (isinstance(adapter, type) and issubclass(adapter, TargetAdapter)):
        raise TypeError(
            f"`adapter` must be a subclass of lantern_hf.TargetAdapter, got {adapter!r}. Pass the class, not an object."
        )
    family = getattr(adapter, "family", None)
    if not isinstance(family, str) or not family:
        raise ValueError(
            f"{adapter.__name__}.family must be a name, got {family!r}. Set `family = 'my_family'` on the class."
        )
    for other in _registered:
        if other.family == family and other is not adapter:
            raise ValueError(
                f"The family {family!r} is registered already, by {other.__module__}.{other.__name__}. Give "
                f"{adapter.__name__} another `family`."
            )
    if adapter not in _registered:
        _registered.insert(0, adapter)
    return adapter


def unregister_target(adapter: type[TargetAdapter]) -> None:
    """Take back `register_target`; a class that is not registered is passed over."""
    if adapter in _registered:
        _registered.remove(adapter)


def adapters() -> tuple[type[TargetAdapter], ...]:
    """Give every adapter class in the order in which they are asked; the general one comes last."""
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.value in _loaded:
            continue
        _loaded.add(entry.value)
        try:
            register_target(entry.load())
        except Exception as error:  # noqa: BLE001 - another package's fault must not take the built-in families away
            logger.warning(
                f"The target {entry.name!r} ({entry.value}) of an installed package was left out: "
                f"{type(error).__name__}: {error}"
            )
    return (*_registered, *BUILT_IN, CausalLMAdapter)
