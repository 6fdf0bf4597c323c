"""Tiny Janus and GLM-Image of the real classes, with real processors and the whole diffusers pipeline of GLM-Image."""

from __future__ import annotations

from typing import Any

import torch
from conftest import NUM_CODES
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, GlmImagePipeline, GlmImageTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    ByT5Tokenizer,
    GenerationConfig,
    GenerationMixin,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageProcessor,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusProcessor,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

# Janus
PAD, BOS, EOS, BOI, EOI, IMAGE = range(6)
SIDE = 4  # a picture has 4 x 4 codes and 16 x 16 pixels
WORDS = ("<unk>", "a", "red", "fox", "blue", "bird", "what", "is", "this")

# GLM-Image: 24 codes, then begin and end of an image and four ids without a meaning; words stand behind
GLM_BOI, GLM_EOI, GLM_OUTPUTS = NUM_CODES, NUM_CODES + 1, NUM_CODES + 6
GLM_PAD, GLM_IMAGE = 40, 41

CHAT = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}{{ image }}"
    "{% else %} {{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


def tiny_janus(attn_implementation: str = "sdpa") -> JanusForConditionalGeneration:
    """Janus with 24 codes, 16 of them a picture. Its text ends with token 2, which is a code as well."""
    torch.manual_seed(3)
    text = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    config = JanusConfig(
        text_config=text.to_dict(),
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "projection_dim": 32,
            "num_image_tokens": SIDE * SIDE,
            "mlp_ratio": 2.0,
        },
        vq_config={
            "embed_dim": 4,
            "num_embeddings": NUM_CODES,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 2],
            "num_res_blocks": 1,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
            "initializer_range": 0.4,
        },
        image_token_id=IMAGE,
        attn_implementation=attn_implementation,
    )
    model = JanusForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, generation_kwargs={"boi_token_id": BOI}
    )
    with torch.no_grad():  # standard initialisation leaves these so small that the codes hardly matter
        model.model.generation_embeddings.weight.normal_(std=3)
        for name, weight in model.model.generation_head.named_parameters():
            if name.endswith("weight"):
                weight.normal_(std=0.4)
    return model


class CommonJanus(JanusForConditionalGeneration):
    """Janus with transformers' common `generate`, which takes a decoding loop for images too."""

    generate = GenerationMixin.generate


def common_janus(attn_implementation: str = "sdpa") -> JanusForConditionalGeneration:
    """The tiny Janus under the common `generate`."""
    model = tiny_janus(attn_implementation)
    model.__class__ = CommonJanus
    return model


def janus_processor() -> JanusProcessor:
    """Janus' processor over a few words."""
    names = ["<pad>", "<s>", "</s>", "<begin_of_image>", "<end_of_image>", "<image_placeholder>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens={
            "image_token": "<image_placeholder>",
            "boi_token": "<begin_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )
    pictures = JanusImageProcessorPil(image_size=16, size={"height": 16, "width": 16}, min_size=4)
    template = "<s>" + CHAT.replace("{{ image }}", "<image_placeholder>")
    processor = JanusProcessor(pictures, fast, chat_template=template)
    processor.num_image_tokens = SIDE * SIDE  # an argument as well, in newer releases
    return processor


def janus_prompts(rows: int) -> dict[str, Tensor]:
    """Prompts of unequal length, padded on the left."""
    words = [["a red fox", "a bird", "a blue bird this is"][row % 3] for row in range(rows)]
    processor = janus_processor()
    texts = ["<s> " + text + " " for text in words]
    return dict(processor(text=texts, generation_mode="image", padding=True, return_tensors="pt"))


def tiny_glm_image(attn_implementation: str = "sdpa") -> GlmImageForConditionalGeneration:
    """GLM-Image's prior with 24 codes. Its ids behind the codes score 0, so that a greedy run takes none of them."""
    torch.manual_seed(4)
    config = GlmImageConfig(
        text_config={
            "vocab_size": 72,
            "vision_vocab_size": GLM_OUTPUTS,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.4,
            "pad_token_id": GLM_PAD,
            "eos_token_id": GLM_EOI,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "intermediate_size": 32,
        },
        vq_config={"embed_dim": 4, "num_embeddings": NUM_CODES, "latent_channels": 16},
        image_token_id=GLM_IMAGE,
        image_start_token_id=GLM_BOI,
        image_end_token_id=GLM_EOI,
        attn_implementation=attn_implementation,
    )
    model = GlmImageForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight[NUM_CODES:] = 0
    return model


def glm_image_inputs(model: GlmImageForConditionalGeneration, rows: int, guided: bool) -> dict[str, Any]:
    """Prompts of unequal length, padded on the left, one grid of 4 x 3 codes each."""
    ids = torch.full((rows, 4 + rows), GLM_PAD)
    for row in range(rows):
        ids[row, -4 - row :] = torch.tensor([*range(50, 53 + row), GLM_BOI])
    grids, counts = torch.tensor([[1, 4, 3]]).repeat(rows, 1), torch.ones(rows, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": (ids != GLM_PAD).long()}
    inputs |= {"image_grid_thw": grids, "images_per_sample": counts}
    return inputs | ({"guidance_scale": 3.0} if guided else {})


def glm_image_logits(model: GlmImageForConditionalGeneration, inputs: dict[str, Any], codes: Tensor) -> Tensor:
    """The stock forward over prompts and codes at once, at the positions of the stock model: `(B, S + T, C)`."""
    names = ("input_ids", "attention_mask", "image_grid_thw", "images_per_sample")
    positions, _ = model.model.get_rope_index(**{name: inputs[name] for name in names})
    behind = model.model._cached_decode_position_ids.transpose(0, 1)[..., : codes.shape[1]]
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(codes)], 1)
    ids = torch.cat([inputs["input_ids"], codes], 1)
    return model(input_ids=ids, attention_mask=mask, position_ids=torch.cat([positions, behind], -1)).logits


def glm_image_processor() -> GlmImageProcessor:
    """GLM-Image's processor over a few words and the numbers up to 19."""
    special = {"<boi>": GLM_BOI, "<eoi>": GLM_EOI, "<pad>": GLM_PAD, "<|image|>": GLM_IMAGE, "<sop>": 42, "<eop>": 43}
    words = special | {name: 44 + index for index, name in enumerate((*WORDS, *map(str, range(19))))}
    words |= {f"<{i}>": i for i in set(range(72)) - set(words.values())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<boi>",
        eos_token="<eoi>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
    )
    pictures = GlmImageImageProcessorPil(
        patch_size=8, merge_size=1, temporal_patch_size=1, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    )
    return GlmImageProcessor(pictures, fast, chat_template=CHAT.replace("{{ image }}", "<boi><|image|><eoi>"))


def glm_image_pipeline(prior: GlmImageForConditionalGeneration) -> GlmImagePipeline:
    """The whole pipeline of diffusers around a prior: glyph encoder, diffusion transformer, VAE."""
    torch.manual_seed(5)
    levels = 4  # the codes of the large grid cover 32 pixels, the latents 8, a patch two of them
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(4, 8, 8, 8),
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    transformer = GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=NUM_CODES,
    )
    glyphs = T5EncoderModel(T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    pipeline = GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=glm_image_processor(),
        text_encoder=glyphs.eval(),
        vision_language_encoder=prior,
        vae=vae.eval(),
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
