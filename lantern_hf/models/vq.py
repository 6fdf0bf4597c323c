"""Image tokenizers as `diffusers.VQModel`: published VQ weights mapped by key renaming, and codes to pixels and back.

LlamaGen's VQ (arXiv 2406.06525) and Chameleon's (arXiv 2405.09818; Meta's `vqgan.ckpt`, taming-transformers style)
have exactly the architecture of `diffusers.VQModel`, so no model is written here: keys are renamed, 1x1 attention
convolutions become Linear, and LlamaGen's codebook is stored L2-normalised, as it is at lookup. `decode_codes` and
`encode_pixels` work for any `VQModel` with `lookup_from_codebook=True`. This file knows no target model and no token
ids, only codes.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.vq_model import VQModel
from torch import Tensor

from lantern_hf._placement import execution_device

# Training leftovers in published files: usage counter (LlamaGen), discriminator and perceptual loss (taming).
IGNORED_KEYS = re.compile(r"quantize\.codebook_used$|loss\.")

_LEVEL = re.compile(r"(encoder|decoder)\.(down|up|conv_blocks)\.(\d+)\.(res|block|attn)\.(\d+)\.")
_LEVEL_KEY = re.compile(r"(encoder|decoder)\.(?:down|up|conv_blocks)\.(\d+)\.(.+)")
_LEAVES = (
    (re.compile(r"^(?:res|block)\.(\d+)\."), r"resnets.\1."),
    (re.compile(r"^attn\.(\d+)\."), r"attentions.\1."),
    (re.compile(r"^downsample\."), "downsamplers.0."),
    (re.compile(r"^upsample\."), "upsamplers.0."),
)
_MIDDLE = {
    "mid.0.": "mid_block.resnets.0.",
    "mid.1.": "mid_block.attentions.0.",
    "mid.2.": "mid_block.resnets.1.",
    "mid.block_1.": "mid_block.resnets.0.",
    "mid.attn_1.": "mid_block.attentions.0.",
    "mid.block_2.": "mid_block.resnets.1.",
}
_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


def llamagen_vq(state_dict: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> VQModel:
    """Map LlamaGen's VQ weights (`vq_ds16_t2i.pt`, `vq_ds16_c2i.pt`) onto a `VQModel`.

    Args:
        state_dict: Published weights, or the file's dict that holds them under `"model"`. The decoder half alone works:
            the encoder's weights are then NaN, `has_encoder` is False and `encode_pixels` raises, also after save and
            load.
        config: Keyword arguments of `VQModel`; read from the shapes of the weights by default.

    Returns:
        The model in float32 and eval mode on the CPU. Its codebook is L2-normalised.

    Raises:
        ValueError: A key is unknown or missing, or a shape does not fit; all of them are named.
    """
    return _build(_unwrap(state_dict), config, "llamagen")


def chameleon_vq(state_dict: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> VQModel:
    """Map Chameleon's VQ weights (Meta's `vqgan.ckpt`; Anole and Lumina-mGPT use the same) onto a `VQModel`.

    Args:
        state_dict: Published weights, or the file's dict that holds them under `"state_dict"`. The decoder half alone
            works as in `llamagen_vq`.
        config: Keyword arguments of `VQModel`; read from the shapes of the weights by default.

    Returns:
        The model in float32 and eval mode on the CPU.

    Raises:
        ValueError: A key is unknown or missing, or a shape does not fit; all of them are named.
    """
    return _build(_unwrap(state_dict), config, "chameleon")


def infer_vq_config(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Read the keyword arguments of `VQModel` from the shapes of published weights, LlamaGen's or taming's.

    Args:
        state_dict: Published weights with the decoder, the codebook and `post_quant_conv`.

    Returns:
        Keyword arguments of `VQModel`, with `lookup_from_codebook=True`.

    Raises:
        ValueError: A weight that tells the geometry is missing.
    """
    weights = _unwrap(state_dict)
    levels = sorted({int(m[3]) for key in weights if (m := _LEVEL.match(key)) and m[1] == "decoder"})
    if not levels:
        raise ValueError(
            "No decoder level (`decoder.conv_blocks.*` or `decoder.up.*`) in these VQ weights, got keys such as "
            f"{sorted(weights)[:3]}. Pass the state dict of LlamaGen's or Chameleon's VQ."
        )
    style = "conv_blocks" if any(key.startswith("decoder.conv_blocks.") for key in weights) else "up"
    # from the highest resolution to the lowest, as `block_out_channels` is
    order = levels if style == "up" else levels[::-1]
    resnet = "res" if style == "conv_blocks" else "block"
    prefixes = [f"decoder.{style}.{level}." for level in order]
    attention = [any(key.startswith(f"{prefix}attn.") for key in weights) for prefix in prefixes]
    num_resnets = len({m[5] for key in weights if (m := _LEVEL.match(key)) and key.startswith(prefixes[0] + resnet)})
    return {
        "in_channels": weights["encoder.conv_in.weight"].shape[1] if "encoder.conv_in.weight" in weights else 3,
        "out_channels": _shape(weights, "decoder.conv_out.weight")[0],
        "down_block_types": tuple("AttnDownEncoderBlock2D" if has else "DownEncoderBlock2D" for has in attention),
        "up_block_types": tuple("AttnUpDecoderBlock2D" if has else "UpDecoderBlock2D" for has in attention[::-1]),
        "block_out_channels": tuple(_shape(weights, f"{prefix}{resnet}.0.conv1.weight")[0] for prefix in prefixes),
        "layers_per_block": num_resnets - 1,  # the decoder has one more than the encoder
        "latent_channels": _shape(weights, "post_quant_conv.weight")[0],
        "num_vq_embeddings": _shape(weights, "quantize.embedding.weight")[0],
        "vq_embed_dim": _shape(weights, "quantize.embedding.weight")[1],
        "mid_block_add_attention": any(key.startswith(("decoder.mid.1.", "decoder.mid.attn_1.")) for key in weights),
        "lookup_from_codebook": True,
    }


def has_encoder(vq: VQModel) -> bool:
    """Tell whether the model can encode: False when it was converted from the decoder half alone (NaN encoder)."""
    return not bool(vq.encoder.conv_in.weight.isnan().any())


@torch.no_grad()
def decode_codes(vq: VQModel, codes: Tensor) -> Tensor:
    """Turn codebook indices into pixels.

    Args:
        vq: A model with `lookup_from_codebook=True`.
        codes: Codebook indices, `(B, h, w)` integers in `[0, num_vq_embeddings)`.

    Returns:
        Pixels `(B, 3, H, W)` of the model's dtype, nominally in [-1, 1]: the decoder's output as it is, not clamped.

    Raises:
        ValueError: `codes` is not `(B, h, w)` or out of range, or the model does not look codes up.
    """
    _check_lookup(vq)
    size = vq.quantize.n_e
    if codes.dim() != 3 or codes.is_floating_point():
        raise ValueError(f"`codes` must be (B, h, w) integers, got {tuple(codes.shape)} {codes.dtype}.")
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= size):
        raise ValueError(
            f"`codes` must be in [0, {size}), got values from {int(codes.min())} to {int(codes.max())}. "
            "Token ids are not codes: map them through the target's adapter first."
        )
    indices = codes.to(device=execution_device(vq), dtype=torch.long)
    shape = (*codes.shape, vq.quantize.vq_embed_dim)
    return vq.decode(indices.flatten(), force_not_quantize=True, shape=shape).sample


@torch.no_grad()
def encode_pixels(vq: VQModel, pixels: Tensor) -> Tensor:
    """Turn pixels into the indices of the nearest codebook entries.

    Args:
        vq: A model with an encoder.
        pixels: Images `(B, 3, H, W)` float in [-1, 1]; H and W are multiples of the downsampling factor.

    Returns:
        Codes `(B, h, w)` int64 on the model's device.

    Raises:
        ValueError: `pixels` has another shape, or the model holds no encoder weights.
    """
    _check_lookup(vq)
    factor = 2 ** (len(vq.encoder.down_blocks) - 1)
    channels = vq.encoder.conv_in.in_channels
    if pixels.dim() != 4 or pixels.shape[1] != channels or pixels.shape[2] % factor or pixels.shape[3] % factor:
        raise ValueError(
            f"`pixels` must be (B, {channels}, H, W) with H and W multiples of {factor}, got {tuple(pixels.shape)}."
        )
    if not has_encoder(vq):
        raise ValueError(
            "This VQ model was converted from decoder weights alone and cannot encode images. "
            "Convert it again from a checkpoint that holds `encoder.*`."
        )
    latents = vq.encode(pixels.to(device=vq.device, dtype=vq.dtype)).latents  # (B, d, h, w)
    _, _, (_, _, indices) = vq.quantize(latents)
    return indices.reshape(latents.shape[0], *latents.shape[2:])


def _check_lookup(vq: VQModel) -> None:
    """Refuse a model whose `decode` would take codes for latents."""
    if not vq.config["lookup_from_codebook"]:
        raise ValueError(
            "`vq` must have `lookup_from_codebook=True` in its config, got False. "
            "Build it as VQModel(..., lookup_from_codebook=True)."
        )


def _unwrap(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Take the weights out of a published file's dict and leave out training leftovers."""
    for name in ("model", "state_dict"):
        if isinstance(state_dict.get(name), Mapping):
            state_dict = state_dict[name]
    return {key: value for key, value in state_dict.items() if not IGNORED_KEYS.match(key)}


def _shape(weights: Mapping[str, Tensor], key: str) -> torch.Size:
    """Give a weight's shape; name the weight when it is missing."""
    if key not in weights:
        raise ValueError(f"`{key}` is missing from the VQ weights, so their geometry is unknown.")
    return weights[key].shape


def vq_names(keys: Iterable[str], family: str, levels: int) -> dict[str, str]:
    """Give diffusers' name of each published key.

    Args:
        keys: Published keys.
        family: `"llamagen"`, or `"chameleon"`, whose decoder numbers its levels by resolution where diffusers numbers
            them in the order they run.
        levels: Resolution levels of the model.

    Returns:
        Names by key; an unknown key keeps its own.
    """

    def block_of(side: str, level: int) -> int:
        return levels - 1 - level if side == "decoder" and family == "chameleon" else level

    return {key: _rename(key, block_of) for key in keys}


def is_attention_projection(name: str, shape: Sequence[int]) -> bool:
    """Tell by diffusers' name and published shape whether a weight is a 1x1 convolution and a Linear in diffusers."""
    return ".attentions." in name and len(shape) == 4 and tuple(shape[2:]) == (1, 1)


def _build(weights: dict[str, Tensor], config: Mapping[str, Any] | None, family: str) -> VQModel:
    """Rename the weights, check them against a fresh model key by key, and load them."""
    vq = VQModel(**(infer_vq_config(weights) if config is None else config))
    names = vq_names(weights, family, len(vq.config.block_out_channels))
    renamed = {names[key]: value for key, value in weights.items()}
    expected = vq.state_dict()
    for key, value in renamed.items():
        if is_attention_projection(key, value.shape):
            renamed[key] = value[:, :, 0, 0]
    if not any(key.startswith("encoder.") for key in renamed):
        renamed |= {
            key: torch.full_like(value, torch.nan)
            for key, value in expected.items()
            if key.startswith(("encoder.", "quant_conv.")) and key not in renamed
        }
    _check_keys(renamed, expected)
    if family == "llamagen":
        renamed["quantize.embedding.weight"] = F.normalize(renamed["quantize.embedding.weight"].float(), dim=-1)
    vq.load_state_dict(renamed)
    return vq.eval()


def _rename(key: str, block_of: Callable[[str, int], int]) -> str:
    """Give diffusers' name of one published key; an unknown key comes back as it is and fails the check."""
    if match := _LEVEL_KEY.match(key):
        side, level, rest = match[1], int(match[2]), match[3]
        for pattern, replacement in _LEAVES:
            rest = pattern.sub(replacement, rest)
        blocks = "down_blocks" if side == "encoder" else "up_blocks"
        key = f"{side}.{blocks}.{block_of(side, level)}.{rest}"
    for published, name in _MIDDLE.items():
        key = re.sub(rf"^(encoder|decoder)\.{re.escape(published)}", rf"\1.{name}", key)
    if match := re.match(r"(.+\.attentions\.\d+)\.(\w+)\.(weight|bias)$", key):
        key = f"{match[1]}.{_ATTENTION.get(match[2], match[2])}.{match[3]}"
    key = key.replace(".nin_shortcut.", ".conv_shortcut.")
    return re.sub(r"^(encoder|decoder)\.norm_out\.", r"\1.conv_norm_out.", key)


def _check_keys(renamed: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Name every key that is unknown, missing or of another shape."""
    problems = [f"unknown key `{key}`" for key in sorted(renamed.keys() - expected.keys())]
    problems += [f"missing key `{key}`" for key in sorted(expected.keys() - renamed.keys())]
    problems += [
        f"`{key}` has shape {tuple(renamed[key].shape)}, expected {tuple(expected[key].shape)}"
        for key in sorted(renamed.keys() & expected.keys())
        if renamed[key].shape != expected[key].shape
    ]
    if problems:
        raise ValueError(
            f"These weights do not fit the VQ model ({len(problems)} problems, diffusers' key names): "
            f"{'; '.join(problems)}. Check that the file is complete and of this family, or pass `config`."
        )
