"""Plans for draft heads: the published drafters of LlamaGen and Anole, and EAGLE-1 heads of text models.

All have one layout: `fc` over `[embedding; hidden state]`, decoder layers, the first perhaps without its input norm,
and a copy of the target's embedding, which is left out. What the shapes do not tell comes from the head's `config.json`
or from the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from lantern_hf._version import __version__
from lantern_hf.convert.checkpoint import Checkpoint, Entry
from lantern_hf.convert.facts import config_grid, config_number, config_section, find_grid
from lantern_hf.convert.plan import Options, Output, Plan, check_layers, check_plan, ignore, refuse, shape_of
from lantern_hf.convert.verify_heads import verify_head
from lantern_hf.draft import LanternDraftConfig, LanternDraftModel, head_config_from
from lantern_hf.models import llamagen as _llamagen  # noqa: F401  registers the configuration of such a target

__all__ = ["head_config", "plan_head"]

_EMBEDDING = "embed_tokens.weight"
_MAX_PREFIX = 4096
_IGNORED = {
    r"embed_tokens\.weight": "copy of the target's embedding; the target's own is used",
    r"lm_head\.weight": "copy of the target's output layer; the target's own is used",
    r".*rotary_emb\.inv_freq": "rotary table, computed",
}


def plan_head(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan the conversion of a draft head.

    Args:
        checkpoint: The source.
        options: What the weights do not tell.

    Returns:
        The plan.

    Raises:
        ValueError: Something is missing, unknown or contradictory, or the head is of another kind.
    """
    config, facts = head_config(checkpoint, options)
    with torch.device("meta"):
        expected = LanternDraftModel(config).state_dict()
    ignored = ignore(checkpoint.tensors, _IGNORED)
    outputs = [Output(key, entry.shape, key) for key, entry in checkpoint.tensors.items() if key not in ignored]
    if config.attention_bias:  # Qwen2 has biases on query, key and value alone; the missing one is zero
        present = {output.name for output in outputs}
        names = [f"layers.{index}.self_attn.o_proj.bias" for index in range(config.num_hidden_layers)]
        outputs += [Output(name, (config.hidden_size,), None, fill=0.0) for name in names if name not in present]
    plan = Plan(
        "draft head", outputs, ignored, facts, partial(_save_config, config), verify=partial(verify_head, config=config)
    )
    return check_plan(plan, expected, [checkpoint])


def _save_config(config: LanternDraftConfig, folder: Path, dtype: torch.dtype) -> None:
    config.dtype, config.lantern_version = dtype, __version__
    config.architectures = [LanternDraftModel.__name__]
    config.save_pretrained(folder)


def head_config(checkpoint: Checkpoint, options: Options) -> tuple[LanternDraftConfig, dict[str, str]]:
    """Read the configuration of a draft head.

    Args:
        checkpoint: The source.
        options: What the user said; with a target, the geometry is the target's.

    Returns:
        The configuration, and what was found or inferred, in words.

    Raises:
        ValueError: Something is missing or contradictory.
    """
    tensors, raw = checkpoint.tensors, checkpoint.config
    target = None if options.target is None else _target_config(options.target)
    if target is None and not raw:
        raise refuse("no config.json beside the weights", "the drafter's whole folder", "Name it, or pass --target.")
    _check_rotary(raw)
    if target is not None:
        _check_rotary(target.get_text_config().to_dict())
    _check_one_kind(tensors, raw)
    shapes = _shapes(tensors, raw, target, options)
    if target is not None:
        _check_target(checkpoint, shapes, target, str(options.target))
        config = head_config_from(target, **(shapes | _numbers(raw)))
        # a folder of this machine means nothing to whoever gets the head
        name = None if Path(str(options.target)).exists() else options.target
        config.verifier = {"name_or_path": name, "architectures": target.architectures}
        facts = {"target": f"{target.model_type}, {options.target}"}
    else:
        geometry, facts = _own_geometry(checkpoint, options, shapes)
        config = LanternDraftConfig(**(shapes | geometry | _numbers(raw)))
    parts = [f"{config.num_hidden_layers} layer(s) of width {config.hidden_size}, {config.num_attention_heads} heads"]
    parts += ["q/k norms"] * config.qk_norm + ["no input norm"] * (not config.input_layernorm)
    facts["head"] = ", ".join(parts)
    if config.grid is not None and "grid" not in facts:
        facts["grid"] = f"{config.grid[0]}x{config.grid[1]} (the target's)"
    return config, facts


def _check_rotary(config: Mapping[str, Any]) -> None:
    """Refuse a scaled rotary embedding, under its old name or its new one."""
    for name in ("rope_scaling", "rope_parameters"):
        kind = config_section(config, name).get("rope_type", config_section(config, name).get("type"))
        if kind not in (None, "default"):
            raise refuse(f"`{name}` of the kind {kind!r}", "an unscaled rotary embedding", "It cannot be converted.")


def _check_one_kind(tensors: Mapping[str, Entry], raw: Mapping[str, Any]) -> None:
    """Refuse heads that read or do something else."""
    if raw.get("swin_norm"):
        raise refuse("`swin_norm` in config.json", "layers that normalise their input", "It cannot be converted.")
    if raw.get("hidden_act", "silu") != "silu":
        raise refuse(f"`hidden_act` {raw['hidden_act']!r} in config.json", "'silu'", "It cannot be converted.")
    rows, columns = shape_of(tensors, "fc.weight")
    if columns != 2 * rows:
        raise refuse(
            f"`fc.weight` of shape {(rows, columns)}",
            "(H, 2H), over one embedding and one hidden state (EAGLE-1)",
            "EAGLE-3 and other heads cannot be converted.",
        )


def _shapes(
    tensors: Mapping[str, Entry], raw: Mapping[str, Any], target: PretrainedConfig | None, options: Options
) -> dict[str, Any]:
    """Fields of the configuration that weights tell, and the number of heads."""
    first = "layers.0.self_attn."
    hidden = shape_of(tensors, "fc.weight")[0]
    layers = check_layers(tensors, "layers.")
    query, key = (shape_of(tensors, f"{first}{name}_proj.weight")[0] for name in "qk")
    text = None if target is None else target.get_text_config()
    normed = f"{first}q_norm.weight" in tensors
    heads = options.num_attention_heads or raw.get("num_attention_heads") or getattr(text, "num_attention_heads", 0)
    if normed:
        heads = shape_of(tensors, f"{first}q_norm.weight")[0]
    if not isinstance(heads, int) or heads < 1 or query % heads or key % (query // heads):
        raise refuse(f"{heads!r} heads for {query} query rows", "a divisor of them", "Pass --heads.")
    found = {"hidden_size": hidden, "num_hidden_layers": layers}
    found["intermediate_size"] = shape_of(tensors, "layers.0.mlp.gate_proj.weight")[0]
    for name, value in (found | {"num_attention_heads": heads}).items():
        if raw.get(name, value) != value:
            raise refuse(f"`{name}` is {value} in the weights", f"{raw[name]}, as config.json says", "Check the files.")
    return found | {
        "num_attention_heads": heads,
        "num_key_value_heads": key // (query // heads),
        "head_dim": query // heads,
        "qk_norm": normed,
        "input_layernorm": "layers.0.input_layernorm.weight" in tensors,
        "fc_bias": "fc.bias" in tensors,
        "attention_bias": f"{first}q_proj.bias" in tensors,
        "mlp_bias": "layers.0.mlp.gate_proj.bias" in tensors,
    }


def _numbers(raw: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of the layers that the head's own `config.json` tells; a drafter's may differ from its target's."""
    theta = config_number(raw, "rope_theta", 0) or config_number(raw, "rope_base", 0)
    found = {
        "rms_norm_eps": config_number(raw, "rms_norm_eps", 0),
        "rope_theta": config_number(config_section(raw, "rope_parameters"), "rope_theta", theta),
    }
    return {name: float(value) for name, value in found.items() if value}


def _vocabulary(checkpoint: Checkpoint, hidden: int) -> int:
    """Tokens of the target, by `config.json` and the copy of its embedding; 0 when neither is there."""
    tokens = int(config_number(checkpoint.config, "vocab_size", 0))
    if _EMBEDDING not in checkpoint.tensors:
        return tokens
    embedded = shape_of(checkpoint.tensors, _EMBEDDING)
    if embedded != (tokens or embedded[0], hidden):
        raise refuse(
            f"`{_EMBEDDING}` of shape {embedded}",
            f"({tokens}, {hidden}), as config.json says",
            "Use the config of these weights.",
        )
    return embedded[0]


def _own_geometry(
    checkpoint: Checkpoint, options: Options, shapes: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """What the head's own `config.json` tells about its layers and its target."""
    raw = checkpoint.config
    vocabulary = _vocabulary(checkpoint, shapes["hidden_size"])
    values: dict[str, Any] = {"target_vocab_size": vocabulary or None}
    if "input_type" in raw or "caption_dim" in raw:
        grid, grid_from = find_grid(checkpoint, options, config_grid(raw))
        text = str(raw.get("input_type") or "t2i").startswith("t2i")
        default = 120 if text else 1
        values |= {
            "rope_type": "2d",
            "grid": list(grid),
            "prefix_length": options.prefix_length or int(config_number(raw, "cls_token_num", default, _MAX_PREFIX)),
            "target_model_type": "llamagen",
            "codebook_size": vocabulary or None,
            # LlamaGenConfig counts the prefix's placeholders; of classes the drafter does not tell the number
            "target_vocab_size": vocabulary + 2 if text and vocabulary else None,
        }
        return values, {"target": "LlamaGen", "grid": f"{grid[0]}x{grid[1]} ({grid_from})"}
    family = "chameleon" if shapes["qk_norm"] else str(raw.get("model_type") or "") or None
    if family == "chameleon":
        values["codebook_size"] = int(config_number(config_section(raw, "vq_config"), "num_embeddings", 0)) or None
    else:
        values["rms_norm_eps"] = 1e-6  # what transformers' Llama takes for a config.json without it
    return values | {"target_model_type": family}, {"target": f"{family or 'unknown'} with {vocabulary} tokens"}


def _target_config(name: str) -> PretrainedConfig:
    """Load the configuration of a target."""
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--target {name!r} has no configuration that transformers knows: {reason}") from error


def _check_target(checkpoint: Checkpoint, shapes: Mapping[str, Any], target: PretrainedConfig, name: str) -> None:
    """Refuse a head of another target."""
    tensors, grid = checkpoint.tensors, getattr(target, "grid_size", None)
    written = config_grid(checkpoint.config)
    if grid is not None and written is not None and tuple(grid) != written:
        raise refuse(
            f"a head for a grid of {written[0]}x{written[1]}",
            f"{grid[0]}x{grid[1]}, as {name} has",
            "Use the drafter of this stage.",
        )
    text = target.get_text_config()
    tokens = text.codebook_size if target.model_type == "llamagen" else text.vocab_size
    found = tensors[_EMBEDDING].shape if _EMBEDDING in tensors else (tokens, shapes["hidden_size"])
    if found != (tokens, text.hidden_size):
        raise refuse(
            f"the head embeds {found[0]} tokens in width {found[1]}",
            f"{tokens} in width {text.hidden_size}, as {name} does",
            "Use the target that it was trained for.",
        )
    if shapes["qk_norm"] != (target.model_type == "chameleon"):
        kind = "with" if shapes["qk_norm"] else "without"
        raise refuse(f"a head {kind} q/k norms", f"one for {target.model_type}", "Use the target it was trained for.")
