"""Which published model a checkpoint is, told by the names of its tensors, and how each kind is planned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from lantern_hf.convert.chameleon import plan_chameleon
from lantern_hf.convert.checkpoint import Checkpoint, Entry
from lantern_hf.convert.heads import plan_head
from lantern_hf.convert.llamagen import plan_llamagen
from lantern_hf.convert.plan import Options, Plan
from lantern_hf.convert.vq import plan_vq

__all__ = ["KINDS", "detect_kind", "make_plan"]

_PLANS: dict[str, Callable[[Checkpoint, Options], Plan]] = {
    "llamagen": plan_llamagen,
    "head": plan_head,
    "llamagen-vq": partial(plan_vq, family="llamagen"),
    "chameleon-vq": partial(plan_vq, family="chameleon"),
    "chameleon": plan_chameleon,
}
KINDS = tuple(_PLANS)
_SIGNS = {
    "llamagen": r"(model\.)?cls_embedding\..+",
    "llamagen-vq": r"decoder\.conv_blocks\..+",
    "chameleon-vq": r"decoder\.up\.\d+\..+",
    "chameleon": r"model\.layers\.\d+\.self_attn\.q_norm\.bias",
    "head": r"fc\.weight",
}
# What people pass by mistake, and what to do with it.
_OTHERS = {
    r"model\.prefix\..+": "a LlamaGen of lantern_hf already: load it with LlamaGenForConditionalGeneration",
    r"midlayer\..+|d2t|t2d": "an EAGLE-3 head, which reads several layers; only EAGLE-1 heads can be converted",
    r"\d+\.\d+\.linear\.weight": "Medusa heads; only EAGLE-1 heads can be converted",
    r"decoder\.up_blocks\..+": "a diffusers VQModel already: load it with VQModel",
    r"shared\.weight|encoder\.block\..+": "a T5 model: transformers loads it",
    r"model\.(language_model\.)?embed_tokens\.weight": "a transformers model: transformers loads it",
}


def detect_kind(tensors: Mapping[str, Entry]) -> str:
    """Tell what a checkpoint is.

    Args:
        tensors: Its tensors.

    Returns:
        One of `KINDS`.

    Raises:
        ValueError: It is none of them.
    """
    for kind, pattern in _SIGNS.items():
        if any(re.fullmatch(pattern, key) for key in tensors):
            return kind
    for pattern, words in _OTHERS.items():
        if any(re.fullmatch(pattern, key) for key in tensors):
            raise ValueError(f"This is {words}.")
    names = ", ".join(f"`{key}`" for key in list(tensors)[:3])
    raise ValueError(
        f"Nothing that can be converted: found {len(tensors)} tensors such as {names}; expected one of "
        f"{', '.join(KINDS)} (their signs: cls_embedding, fc.weight, decoder.conv_blocks, decoder.up, q_norm)."
    )


def make_plan(checkpoint: Checkpoint, kind: str, options: Options) -> Plan:
    """Plan the conversion of a checkpoint.

    Args:
        checkpoint: The source.
        kind: One of `KINDS`, or `"auto"`.
        options: What the weights do not tell.

    Returns:
        The plan.

    Raises:
        ValueError: The checkpoint is of another kind, or not whole.
    """
    if kind not in (*KINDS, "auto"):
        raise ValueError(f"`kind` must be one of {', '.join(('auto', *KINDS))}, got {kind!r}.")
    if not checkpoint.tensors:
        raise ValueError(f"{checkpoint.label} holds no tensors.")
    found = detect_kind(checkpoint.tensors)
    if kind not in ("auto", found):
        raise ValueError(
            f"{checkpoint.label} is of the kind {found}; expected {kind}. Leave out --kind, or name another."
        )
    return _PLANS[found](checkpoint, options)
