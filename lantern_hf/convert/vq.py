"""Plans for VQ models: LlamaGen's `vq_ds16_*.pt` and Meta's `vqgan.ckpt`, as a folder of `diffusers.VQModel`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.vq_model import VQModel

from lantern_hf.convert.checkpoint import Checkpoint
from lantern_hf.convert.plan import Options, Output, Plan, check_plan, refuse
from lantern_hf.convert.verify_vq import verify_vq
from lantern_hf.models.vq import IGNORED_KEYS, infer_vq_config, is_attention_projection, vq_names

__all__ = ["plan_vq"]

_CODEBOOK = "quantize.embedding.weight"
_NEEDED_TO_ENCODE = ("encoder.", "quant_conv.")


def plan_vq(checkpoint: Checkpoint, options: Options, family: str) -> Plan:
    """Plan the conversion of a VQ model.

    Args:
        checkpoint: The source. The decoder half alone will do; the encoder is then NaN.
        options: Not read; a VQ model tells all of itself.
        family: `"llamagen"` or `"chameleon"`.

    Returns:
        The plan.

    Raises:
        ValueError: Something is missing or unknown.
    """
    ignored = {key: "training leftover" for key in checkpoint.tensors if IGNORED_KEYS.match(key)}
    weights = {key: entry for key, entry in checkpoint.tensors.items() if key not in ignored}
    config = _config(weights)
    with torch.device("meta"):
        vq = VQModel(**config)
    expected = vq.state_dict()
    names = vq_names(weights, family, len(config["block_out_channels"]))
    outputs = []
    for key, entry in weights.items():
        shape = entry.shape[:2] if is_attention_projection(names[key], entry.shape) else entry.shape
        normalize = family == "llamagen" and key == _CODEBOOK
        outputs.append(Output(names[key], shape, key, normalize=normalize))
    facts = {"codes": "{num_vq_embeddings} of dimension {vq_embed_dim}".format(**config)}
    if not any(key.startswith("encoder.") for key in weights):
        present = set(names.values())
        missing = [key for key in expected if key.startswith(_NEEDED_TO_ENCODE) and key not in present]
        outputs += [Output(key, tuple(expected[key].shape), None) for key in missing]
        facts["encoder"] = "not in the file, so NaN: this model decodes only"
    plan = Plan(
        "LlamaGen VQ model" if family == "llamagen" else "Chameleon VQ model",
        outputs,
        ignored,
        facts,
        partial(_save_config, vq),
        stem="diffusion_pytorch_model",
        verify=partial(verify_vq, family=family),
    )
    return check_plan(plan, expected, [checkpoint])


def _config(weights: dict[str, Any]) -> dict[str, Any]:
    """Read the geometry from the shapes."""
    try:
        config = infer_vq_config(weights)
    except (IndexError, KeyError) as error:
        raise refuse("a VQ model with shapes of no VQ model", "convolutions of four dimensions", str(error)) from error
    if not all(isinstance(width, int) and width > 0 and width % 32 == 0 for width in config["block_out_channels"]):
        raise refuse(
            f"blocks of {config['block_out_channels']} channels", "multiples of 32, for the norms", "Check the file."
        )
    return config


def _save_config(vq: VQModel, folder: Path, dtype: torch.dtype) -> None:
    vq.save_config(folder)
