"""VQ weights onto `diffusers.VQModel`: golden decoders, loud conversion, codes to pixels and back."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import VQModel
from safetensors.torch import load_file

from lantern_hf.models.vq import chameleon_vq, decode_codes, encode_pixels, has_encoder, infer_vq_config, llamagen_vq

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = {"llamagen_vq": llamagen_vq, "chameleon_vq": chameleon_vq}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def weights_of(family):
    return load_file(GOLDEN / f"{family}.safetensors")


def small_vq(**changes):
    """The geometry of the embedded model, on fewer pixels."""
    torch.manual_seed(0)
    config = {
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "block_out_channels": (16, 32, 64),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "latent_channels": 16,
        "num_vq_embeddings": 512,
        "vq_embed_dim": 8,
        "mid_block_add_attention": False,
        "lookup_from_codebook": True,
    }
    return VQModel(**(config | changes)).eval()


def full_weights(family):
    """Golden weights plus a random encoder under the published key names, and that encoder under diffusers' names."""
    weights = weights_of(family)
    encoder = {}
    vq = FAMILIES[family](weights)
    torch.manual_seed(0)
    for key, value in vq.state_dict().items():
        if not key.startswith("encoder."):
            continue
        encoder[key] = value = torch.randn_like(value) * 0.1
        name = key.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        name = name.replace("downsamplers.0", "downsample")
        if ".attentions." in name and value.dim() == 2:
            value = value[:, :, None, None]
        for ours, theirs in (
            ("group_norm", "norm"),
            ("to_q", "q"),
            ("to_k", "k"),
            ("to_v", "v"),
            ("to_out.0", "proj_out"),
        ):
            name = name.replace(ours, theirs)
        if family == "llamagen_vq":
            name = name.replace("mid_block.resnets.0", "mid.0").replace("mid_block.resnets.1", "mid.2")
            name = name.replace("mid_block.attentions.0", "mid.1").replace("down_blocks", "conv_blocks")
            name = name.replace("resnets", "res").replace("attentions", "attn")
        else:
            name = name.replace("mid_block.resnets.0", "mid.block_1").replace("mid_block.resnets.1", "mid.block_2")
            name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("down_blocks", "down")
            name = name.replace("resnets", "block").replace("attentions", "attn")
        weights[name] = value
    return weights, encoder


def test_decodes_as_the_published_code(family):
    vq = FAMILIES[family](weights_of(family))
    io = load_file(GOLDEN / f"{family}_io.safetensors")
    image = decode_codes(vq, io["codes"].view(1, 4, 4))
    torch.testing.assert_close(image, io["image"], atol=1e-4, rtol=0)


def test_infers_the_geometry(family):
    config = infer_vq_config(weights_of(family))
    published = json.loads((GOLDEN / f"{family}_config.json").read_text())
    assert config["block_out_channels"] == (32, 64)
    assert config["layers_per_block"] == 1
    assert config["num_vq_embeddings"] == published.get("codebook_size", published.get("n_embed"))
    assert config["vq_embed_dim"] == published.get("codebook_embed_dim", published.get("embed_dim"))
    assert config["mid_block_add_attention"]
    has_attention = family == "llamagen_vq"
    assert config["up_block_types"][0] == ("AttnUpDecoderBlock2D" if has_attention else "UpDecoderBlock2D")


def test_stores_the_codebook_as_looked_up():
    weights = weights_of("llamagen_vq")
    norms = llamagen_vq(weights).quantize.embedding.weight.norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))
    raw = weights_of("chameleon_vq")["quantize.embedding.weight"]
    assert torch.equal(chameleon_vq(weights_of("chameleon_vq")).quantize.embedding.weight, raw)


def test_full_checkpoint_encodes(family):
    weights, encoder = full_weights(family)
    leftovers = {"quantize.codebook_used": torch.zeros(3), "loss.discriminator.main.0.weight": torch.zeros(1)}
    wrapper = "model" if family == "llamagen_vq" else "state_dict"
    vq = FAMILIES[family]({wrapper: weights | leftovers, "epoch": 3})
    assert has_encoder(vq)
    assert all(torch.equal(vq.state_dict()[key], value) for key, value in encoder.items())
    codes = encode_pixels(vq, torch.rand(2, 3, 8, 8) * 2 - 1)
    assert codes.shape == (2, 4, 4)
    assert codes.dtype == torch.long


def test_decoder_alone_does_not_encode(family, tmp_path):
    vq = FAMILIES[family](weights_of(family))
    vq.save_pretrained(tmp_path)
    for model in (vq, VQModel.from_pretrained(tmp_path)):
        assert not has_encoder(model)
        with pytest.raises(ValueError, match="decoder weights alone"):
            encode_pixels(model, torch.zeros(1, 3, 8, 8))


def test_names_an_unknown_key(family):
    with pytest.raises(ValueError, match="unknown key `decoder.extra.weight`"):
        FAMILIES[family](weights_of(family) | {"decoder.extra.weight": torch.zeros(1)})


@pytest.mark.parametrize("key", ["decoder.conv_in.bias", "post_quant_conv.bias"])
def test_names_a_missing_key(family, key):
    weights = weights_of(family)
    del weights[key]
    with pytest.raises(ValueError, match=f"missing key `{key}`"):
        FAMILIES[family](weights)


def test_names_a_missing_key_of_the_encoder(family):
    weights, _ = full_weights(family)
    del weights["encoder.conv_in.bias"]
    with pytest.raises(ValueError, match="missing key `encoder.conv_in.bias`"):
        FAMILIES[family](weights)


def test_names_a_wrong_shape(family):
    weights = weights_of(family)
    weights["decoder.conv_in.bias"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"`decoder.conv_in.bias` has shape \(7,\), expected \(64,\)"):
        FAMILIES[family](weights)


def test_refuses_other_weights():
    with pytest.raises(ValueError, match="No decoder level"):
        llamagen_vq({"model.embed_tokens.weight": torch.zeros(2, 2)})


def test_config_wins_over_shapes(family):
    config = infer_vq_config(weights_of(family)) | {"num_vq_embeddings": 63}
    with pytest.raises(ValueError, match="quantize.embedding.weight"):
        FAMILIES[family](weights_of(family), config)


def test_small_model_round_trip():
    vq = small_vq()
    codes = torch.arange(2 * 4 * 4).view(2, 4, 4)
    pixels = decode_codes(vq, codes)
    assert pixels.shape == (2, 3, 16, 16)
    again = encode_pixels(vq, pixels)
    assert again.shape == codes.shape
    # the rows of a batch are kept apart, and in order
    assert torch.equal(encode_pixels(vq, pixels[1:]), again[1:])
    torch.testing.assert_close(decode_codes(vq, codes[1:]), pixels[1:], atol=1e-5, rtol=0)


def test_encodes_to_the_nearest_entry():
    vq = small_vq()
    pixels = torch.rand(1, 3, 16, 8) * 2 - 1
    latents = vq.encode(pixels).latents[0]  # (d, h, w)
    distance = (latents[None] - vq.quantize.embedding.weight[:, :, None, None]).square().sum(1)  # (K, h, w)
    assert torch.equal(encode_pixels(vq, pixels)[0], distance.argmin(0))


def test_decode_errors():
    vq = small_vq()
    with pytest.raises(ValueError, match=r"\(B, h, w\) integers, got \(16,\)"):
        decode_codes(vq, torch.zeros(16, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\[0, 512\), got values from 0 to 512"):
        decode_codes(vq, torch.tensor([[[0, 512]]]))
    with pytest.raises(ValueError, match="multiples of 4"):
        encode_pixels(vq, torch.zeros(1, 3, 10, 8))
    with pytest.raises(ValueError, match="lookup_from_codebook"):
        decode_codes(small_vq(lookup_from_codebook=False), torch.zeros(1, 1, 1, dtype=torch.long))
