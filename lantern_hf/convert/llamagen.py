"""Plans for LlamaGen targets (arXiv 2406.06525): Hub-style weights, and FoundationVision's own files.

Both hold the same model under different names; the second fuses query, key and value. Sizes come from the shapes,
heads from `config.json` or the table of published sizes, the grid from `config.json` or the file's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lantern_hf.convert.checkpoint import Checkpoint, Entry
from lantern_hf.convert.facts import config_grid, config_number, find_grid, find_heads
from lantern_hf.convert.plan import Options, Output, Plan, check_layers, check_plan, ignore, refuse, shape_of
from lantern_hf.convert.verify_llamagen import verify_llamagen
from lantern_hf.models.configuration_llamagen import LlamaGenConfig
from lantern_hf.models.llamagen import LlamaGenForConditionalGeneration, rename_published

__all__ = ["PUBLISHED_SIZES", "Layout", "llamagen_config", "llamagen_layout", "plan_llamagen"]

PUBLISHED_SIZES = {
    # (layers, width): name
    (12, 768): "B",
    (24, 1024): "L",
    (36, 1280): "XL",
    (48, 1536): "XXL",
    (22, 2048): "1B",
    (24, 3200): "3B",
    (32, 4096): "7B",
}
_IGNORED = {
    r"(model\.)?freqs_cis|.*rotary_emb\.inv_freq": "rotary table, computed",
    r"(model\.)?causal_mask": "mask, computed",
    r".*kv_cache\.[kv]_cache": "cache of a generation",
}


@dataclass(frozen=True)
class Layout:
    """Names of a published LlamaGen.

    Attributes:
        fused: Whether query, key and value are one tensor (FoundationVision).
        layer: Prefix of a layer's names, before its number.
        embed: The embedding of the codes.
        norm: The last norm.
        head: The output layer.
        prefix: Prefix of the conditioning's names.
        gate: First projection of the MLP, within a layer.
    """

    fused: bool
    layer: str
    embed: str
    norm: str
    head: str
    prefix: str
    gate: str


HUB = Layout(
    False,
    "model.layers.",
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.cls_embedding.",
    "mlp.gate_proj",
)
FOUNDATION = Layout(
    True, "layers.", "tok_embeddings.weight", "norm.weight", "output.weight", "cls_embedding.", "feed_forward.w1"
)
# FoundationVision's names within the whole model and within a layer, and the Hub-style ones.
_OUTER = {FOUNDATION.embed: HUB.embed, FOUNDATION.norm: HUB.norm, FOUNDATION.head: HUB.head}
_INNER = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def llamagen_layout(tensors: Mapping[str, Entry]) -> Layout:
    """Tell which names a published LlamaGen has."""
    return FOUNDATION if any(key.startswith("tok_embeddings.") for key in tensors) else HUB


def plan_llamagen(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan the conversion of a LlamaGen target.

    Args:
        checkpoint: The source.
        options: What the weights do not tell.

    Returns:
        The plan.

    Raises:
        ValueError: Something is missing, unknown or contradictory.
    """
    layout = llamagen_layout(checkpoint.tensors)
    config, facts = llamagen_config(checkpoint, layout, options)
    with torch.device("meta"):
        expected = LlamaGenForConditionalGeneration(config).state_dict()
    ignored = ignore(checkpoint.tensors, _IGNORED)
    outputs = [
        output
        for key, entry in checkpoint.tensors.items()
        if key not in ignored
        for output in _outputs(key, entry, config, layout)
    ]
    plan = Plan(
        "LlamaGen target",
        outputs,
        ignored,
        facts,
        partial(_save_config, config),
        verify=partial(verify_llamagen, config=config, layout=layout),
    )
    return check_plan(plan, expected, [checkpoint])


def _save_config(config: LlamaGenConfig, folder: Path, dtype: torch.dtype) -> None:
    config.dtype = dtype
    config.architectures = [LlamaGenForConditionalGeneration.__name__]
    config.save_pretrained(folder)


def llamagen_config(checkpoint: Checkpoint, layout: Layout, options: Options) -> tuple[LlamaGenConfig, dict[str, str]]:
    """Read the configuration of a LlamaGen from its shapes, its `config.json` and its name.

    Args:
        checkpoint: The source.
        layout: Its names.
        options: What the user said.

    Returns:
        The configuration, and what was found or inferred, in words.

    Raises:
        ValueError: Something is missing or contradictory.
    """
    tensors, raw = checkpoint.tensors, checkpoint.config
    codes, hidden = shape_of(tensors, layout.embed)
    layers = check_layers(tensors, layout.layer)
    intermediate = shape_of(tensors, f"{layout.layer}0.{layout.gate}.weight")[0]
    heads, heads_from = find_heads(hidden, raw, options.num_attention_heads)
    head_dim = hidden // heads
    projection = "attention.wqkv" if layout.fused else "self_attn.k_proj"
    rows = shape_of(tensors, f"{layout.layer}0.{projection}.weight")[0]
    kv_heads = ((rows - hidden) // 2 if layout.fused else rows) // head_dim
    conditioning, words = _conditioning(tensors, layout, raw, options)
    grid, grid_from = find_grid(checkpoint, options, config_grid(raw))
    _check_config(raw, {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate})
    config = LlamaGenConfig(
        codebook_size=codes,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, kv_heads),
        head_dim=head_dim,
        grid_size=list(grid),
        rms_norm_eps=float(config_number(raw, "rms_norm_eps", 1e-5)),
        rope_parameters={"rope_type": "default", "rope_theta": float(config_number(raw, "rope_base", 10000))},
        **conditioning,
    )
    size = PUBLISHED_SIZES.get((layers, hidden), "not a published one")
    facts = {
        "layout": "FoundationVision" if layout.fused else "Hub",
        "size": f"{size}: {layers} layers, width {hidden}, {heads} heads ({heads_from})",
        "codes": str(codes),
        "grid": f"{grid[0]}x{grid[1]} ({grid_from})",
        "conditioning": words,
    }
    return config, facts


def _conditioning(
    tensors: Mapping[str, Entry], layout: Layout, raw: Mapping[str, Any], options: Options
) -> tuple[dict[str, Any], str]:
    """Tell text from classes, and how wide and long the prefix is."""
    table, uncond = f"{layout.prefix}embedding_table.weight", f"{layout.prefix}uncond_embedding"
    if table in tensors:
        if options.prefix_length not in (None, 1):
            raise refuse(f"a prefix of {options.prefix_length}", "1 for classes", "Leave out the prefix length.")
        classes = shape_of(tensors, table)[0] - 1
        return {"conditioning": "class", "num_classes": classes}, f"{classes} classes and none"
    rows, _ = shape_of(tensors, uncond)
    width = shape_of(tensors, f"{layout.prefix}cap_proj.fc1.weight")[1]
    length = options.prefix_length or int(config_number(raw, "cls_token_num", rows))
    if not 1 <= length <= rows:
        raise refuse(f"a prefix of {length}", f"1 to {rows}, the unconditional rows", "Correct the prefix length.")
    words = f"text, {length} positions of width {width}" + (f" ({rows} rows are there)" if rows != length else "")
    return {"conditioning": "text", "caption_dim": width, "prefix_length": length}, words


def _check_config(raw: Mapping[str, Any], found: Mapping[str, int]) -> None:
    """Refuse a `config.json` of another model."""
    for name, value in found.items():
        if raw.get(name, value) != value:
            raise refuse(
                f"`{name}` is {value} in the weights and {raw[name]} in config.json",
                "the config of these weights",
                "Name the weight file, or put the right config.json beside it.",
            )


def _outputs(key: str, entry: Entry, config: LlamaGenConfig, layout: Layout) -> list[Output]:
    """What one source tensor becomes."""
    if layout.fused and re.fullmatch(r"layers\.\d+\.attention\.wqkv\.weight", key):
        return _split(key, config)
    name = rename_published(_hub_name(key) if layout.fused else key)
    rotated = re.search(r"self_attn\.[qk]_proj\.weight$", name)
    head_dim = config.hidden_size // config.num_attention_heads if rotated else 0
    shape = entry.shape
    if name.endswith("uncond_embedding"):  # 120 rows are published, whatever the prefix; only the first are read
        shape = (min(config.prefix_length, shape[0]), *shape[1:]) if shape else shape
    return [Output(name, shape, key, head_dim=head_dim)]


def _split(key: str, config: LlamaGenConfig) -> list[Output]:
    """Query, key and value of one fused tensor."""
    outer = f"model.{key.split('.attention.')[0]}.self_attn."
    width = config.hidden_size
    head_dim = width // config.num_attention_heads
    other = (config.num_key_value_heads or config.num_attention_heads) * head_dim
    return [
        Output(f"{outer}q_proj.weight", (width, width), key, head_dim=head_dim),
        Output(f"{outer}k_proj.weight", (other, width), key, start=width, head_dim=head_dim),
        Output(f"{outer}v_proj.weight", (other, width), key, start=width + other),
    ]


def _hub_name(key: str) -> str:
    """Give the Hub-style name of one of FoundationVision's; an unknown one comes back and fails the check."""
    if key in _OUTER:
        return _OUTER[key]
    if key.startswith(FOUNDATION.prefix):
        return f"model.{key}"
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", key)
    inner = _INNER.get(match[2]) if match else None
    return f"model.layers.{match[1]}.{inner}.weight" if match and inner else key
