"""Plans for Hub-style Chameleon checkpoints that transformers cannot load whole: Lumina-mGPT's lack the VQ model.

transformers loads Anole and Chameleon by itself, names unchanged. Where the VQ encoder and codebook are missing it
would make up random ones, and with them random neighbours; here they come from Meta's `vqgan.ckpt`. Torch files come
out as safetensors on the way.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import ChameleonConfig, ChameleonForConditionalGeneration

from lantern_hf.convert.checkpoint import Checkpoint
from lantern_hf.convert.plan import Options, Output, Plan, check_layers, check_plan, ignore, refuse
from lantern_hf.models.vq import IGNORED_KEYS

__all__ = ["plan_chameleon"]

_VQ = "model.vqmodel."
_MAX_BLOCKS = 64
_IGNORED = {r".*rotary_emb\.inv_freq": "rotary table, computed"}
_VQ_PARTS = ("encoder.", "quant_conv.", "post_quant_conv.", "quantize.embedding.")


def plan_chameleon(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan the completion of a Hub-style Chameleon.

    Args:
        checkpoint: The source.
        options: `vq` completes it.

    Returns:
        The plan.

    Raises:
        ValueError: Something is missing or unknown, or there is nothing to do.
    """
    tensors = checkpoint.tensors
    has_vq = any(key.startswith(_VQ) for key in tensors)
    if has_vq and options.vq is not None:
        raise refuse("a checkpoint with its VQ model", "no other one", "Leave out --vq.")
    if not has_vq and options.vq is None:
        raise refuse(
            f"a Chameleon without `{_VQ}*`, whose codebook transformers would make up",
            "the VQ model too",
            "Pass --vq with Meta's vqgan.ckpt.",
        )
    if has_vq and all(file.suffix == ".safetensors" for file in checkpoint.files):
        raise refuse(
            "a complete Chameleon in safetensors",
            "one that lacks something",
            "Nothing is to be converted: ChameleonForConditionalGeneration.from_pretrained loads it.",
        )
    config = _config(checkpoint.config, check_layers(tensors, "model.layers."))
    with torch.device("meta"):
        expected = ChameleonForConditionalGeneration(config).state_dict()
    ignored = ignore(tensors, _IGNORED)
    outputs = [Output(key, entry.shape, key) for key, entry in tensors.items() if key not in ignored]
    facts = {"size": f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.vocab_size} tokens"}
    checkpoints = [checkpoint]
    if options.vq is not None:
        outputs += _vq_outputs(options.vq)
        checkpoints.append(options.vq)
        facts["VQ model"] = options.vq.label
    plan = Plan("Chameleon", outputs, ignored, facts, partial(_save_config, config))
    return check_plan(plan, expected, checkpoints)


def _config(raw: dict[str, Any], layers: int) -> ChameleonConfig:
    """Make transformers' configuration of a published one."""
    if not str(raw.get("model_type", "")).startswith("chameleon"):
        raise refuse(f"`model_type` {raw.get('model_type')!r} in config.json", "chameleon", "Name the whole folder.")
    if not raw.get("vocabulary_map"):
        raise refuse(
            "a config.json without `vocabulary_map`, which tells the image tokens",
            "that of Chameleon",
            "Copy it from the config.json of facebook/chameleon-7b.",
        )
    try:
        config = ChameleonConfig.from_dict(raw | {"model_type": "chameleon"})
        vq: Any = config.vq_config
        blocks = len(vq.channel_multiplier) * vq.num_res_blocks
    except (StrictDataclassError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise refuse(
            "a config.json that transformers cannot read", "Chameleon's", " ".join(str(error).split())
        ) from error
    # Both become modules one by one, so that an absurd number would never end.
    if config.num_hidden_layers != layers or blocks > _MAX_BLOCKS:
        raise refuse(
            f"{config.num_hidden_layers} layers and {blocks} VQ blocks in config.json",
            f"{layers} layers, as the weights have, and at most {_MAX_BLOCKS} blocks",
            "Use the config of these weights.",
        )
    return config


def _vq_outputs(vq: Checkpoint) -> list[Output]:
    """The encoder and the codebook of a VQ checkpoint, under Chameleon's names; the decoder has no place there."""
    parts = {key: entry for key, entry in vq.tensors.items() if key.startswith(_VQ_PARTS)}
    if not any(key.startswith("encoder.") for key in parts):
        raise refuse(f"{vq.label} without `encoder.*`", "Meta's vqgan.ckpt", "Pass the whole file as --vq.")
    known = (*_VQ_PARTS, "decoder.")
    if unknown := [key for key in vq.tensors if not key.startswith(known) and not IGNORED_KEYS.match(key)]:
        raise refuse(f"`{unknown[0]}` in {vq.label}", f"names in {', '.join(known)}", "Pass Meta's vqgan.ckpt as --vq.")
    return [Output(_VQ + key, entry.shape, key, origin=1) for key, entry in parts.items()]


def _save_config(config: ChameleonConfig, folder: Path, dtype: torch.dtype) -> None:
    config.dtype = dtype
    config.architectures = [ChameleonForConditionalGeneration.__name__]
    config.save_pretrained(folder)
