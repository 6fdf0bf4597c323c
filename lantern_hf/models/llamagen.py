"""LlamaGen (arXiv 2406.06525) as a transformers model: a stock Llama decoder with a 2-D rotary table and a prefix.

Nothing of Llama is copied or forked: the decoder is `transformers.LlamaModel` with its rotary module replaced, so that
every attention implementation, cache and device map of Llama works. Published weights rotate interleaved pairs, Llama
rotates halves; `convert_published_state_dict` reorders the rows of the query and key projections once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    LlamaModel,
    PreTrainedModel,  # noqa: F401  diffusers asks this module for it when it loads a pipeline's transformer
)
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from lantern_hf._placement import execution_device
from lantern_hf.cache import CACHE_KEYWORD
from lantern_hf.models.configuration_llamagen import LlamaGenConfig
from lantern_hf.models.rotary import RotaryTable2D


class LlamaGenRotaryEmbedding(nn.Module):
    """Give Llama's attention the cosines and sines of LlamaGen's prefix and grid.

    Args:
        config: The model's configuration.
    """

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        theta = float((config.rope_parameters or {}).get("rope_theta") or 10000.0)
        self.table = RotaryTable2D(config.grid_size, config.prefix_length, head_dim, theta, config.prefix_rotation)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(cos, sin)`, each `(B, S, head_dim)` in x's dtype, both halves alike as Llama's rotation wants."""
        cos, sin = self.table(position_ids.to(x.device))
        return torch.cat([cos, cos], -1).to(x.dtype), torch.cat([sin, sin], -1).to(x.dtype)


class LlamaGenPrefix(nn.Module):
    """Turn caption features or classes into the embeddings of the prefix.

    Args:
        config: The model's configuration; `conditioning` decides which weights exist.
    """

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        if config.conditioning == "text":
            self.fc1 = nn.Linear(config.caption_dim, config.hidden_size, bias=False)
            self.fc2 = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
            self.uncond_embedding = nn.Parameter(torch.zeros(config.prefix_length, config.caption_dim))
        else:
            self.class_embedding = nn.Embedding(config.num_classes + 1, config.hidden_size)

    def forward(self, features: Tensor | None = None) -> Tensor:
        """Project caption features `(..., caption_dim)` to `(..., hidden_size)`; None takes the unconditional ones.

        Whoever needs either calls the module, since accelerate may keep its weights elsewhere between calls.
        """
        features = self.uncond_embedding if features is None else features
        # Not the dtype of fc1, which has none when quantised.
        return self.fc2(F.gelu(self.fc1(features.to(self.uncond_embedding.dtype)), approximate="tanh"))


class LlamaGenPreTrainedModel(LlamaPreTrainedModel):
    """Ties the LlamaGen modules to their configuration and initialisation."""

    config: LlamaGenConfig
    base_model_prefix = "model"
    input_modalities = ["text"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlamaGenPrefix) and hasattr(module, "uncond_embedding"):
            init.normal_(module.uncond_embedding, std=self.config.caption_dim**-0.5)


class LlamaGenModel(LlamaGenPreTrainedModel, LlamaModel):
    """The decoder without its output layer: prefix and codes in, hidden states out.

    Args:
        config: The model's configuration.
    """

    def __init__(self, config: LlamaGenConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.codebook_size, config.hidden_size)
        self.rotary_emb = LlamaGenRotaryEmbedding(config)  # type: ignore[assignment]
        self.prefix = LlamaGenPrefix(config)
        self.post_init()

    def embed(self, input_ids: Tensor, position_ids: Tensor, caption_embeds: Tensor | None = None) -> Tensor:
        """Embed codes and prefix placeholders.

        Args:
            input_ids: Token ids, `(B, S)` int64.
            position_ids: Their positions, `(B, S)` or `(1, S)` int64; they pick the row of the unconditional embedding.
            caption_embeds: Caption features, `(B, S_c, caption_dim)`, `S_c` columns from the first one of `input_ids`.

        Returns:
            `(B, S, hidden_size)`.

        Raises:
            ValueError: Caption placeholders without features, or features that do not cover them.
        """
        num_codes = self.config.codebook_size
        embeds = self.embed_tokens(input_ids.clamp_max(num_codes - 1))
        input_ids, position_ids = input_ids.to(embeds.device), position_ids.to(embeds.device)
        if self.config.conditioning == "class":
            return self._embed_class(embeds, input_ids)
        if caption_embeds is not None:
            return self._embed_caption(embeds, input_ids, position_ids, caption_embeds)
        # A single token is a decoding step, unless the whole prefix is one; looking at the id would cost a sync.
        if input_ids.shape[1] == 1 and self.config.prefix_length > 1:
            return embeds
        return self._embed_uncond(embeds, input_ids, position_ids)

    def _embed_class(self, embeds: Tensor, input_ids: Tensor) -> Tensor:
        classes = (input_ids - self.config.codebook_size).clamp_min(0)
        is_class = (input_ids >= self.config.codebook_size)[..., None]
        return torch.where(is_class, self.prefix.class_embedding(classes).to(embeds), embeds)

    def _embed_uncond(self, embeds: Tensor, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        rows = position_ids.clamp(0, self.config.prefix_length - 1)
        learned = self.prefix().to(embeds)[rows]
        is_uncond = (input_ids == self.config.uncond_token_id)[..., None]
        return torch.where(is_uncond, learned, embeds)

    def _embed_caption(self, embeds: Tensor, input_ids: Tensor, position_ids: Tensor, features: Tensor) -> Tensor:
        columns = features.shape[1]
        if columns > input_ids.shape[1] or features.shape[-1] != self.config.caption_dim:
            raise ValueError(
                f"`caption_embeds` is {tuple(features.shape)}, but `input_ids` has {input_ids.shape[1]} columns and "
                f"this model takes features of width {self.config.caption_dim}. Pass one feature vector for each "
                "prefix position."
            )
        embeds = self._embed_uncond(embeds, input_ids, position_ids)
        caption = F.pad(self.prefix(features), (0, 0, 0, input_ids.shape[1] - columns)).to(embeds)
        return torch.where((input_ids == self.config.caption_token_id)[..., None], caption, embeds)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        caption_embeds: Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Run the decoder; arguments as `transformers.LlamaModel.forward`, plus `caption_embeds` (see `embed`).

        Positions count columns, padding included: the prefix is padded on the left to `prefix_length`, so that the
        first code always stands at position `prefix_length`, as in the published model.
        """
        cache = kwargs.pop(CACHE_KEYWORD, cache)  # where transformers calls it by an older name
        if inputs_embeds is None:
            if input_ids is None:
                raise ValueError("Pass `input_ids` or `inputs_embeds`; both are None.")
            if position_ids is None:
                past = cache.get_seq_length() if cache is not None else 0
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None] + past
            inputs_embeds = self.embed(input_ids, position_ids, caption_embeds)
        return super().forward(
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **{CACHE_KEYWORD: cache},
            **kwargs,
        )


class LlamaGenForConditionalGeneration(LlamaGenPreTrainedModel, GenerationMixin):
    """LlamaGen with its output layer; `generate` draws images as code sequences.

    Text: `generate(input_ids=model.caption_ids(B), attention_mask=mask, caption_embeds=features, max_new_tokens=h *
        w)`.
    Class: `generate(input_ids=codebook_size + classes[:, None], max_new_tokens=h * w)`. For classifier-free guidance
        add
    `guidance_scale=s, negative_prompt_ids=model.unconditional_ids(B), negative_prompt_attention_mask=mask`.

    Args:
        config: The model's configuration.
    """

    def __init__(self, config: LlamaGenConfig):
        super().__init__(config)
        self.model = LlamaGenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.codebook_size, bias=False)
        self.post_init()

    def caption_ids(self, batch_size: int) -> Tensor:
        """Placeholder prefix of a caption, `(batch_size, prefix_length)` int64 on the model's device."""
        return self._prefix_ids(batch_size, self.config.caption_token_id)

    def unconditional_ids(self, batch_size: int) -> Tensor:
        """Prefix of the unconditional stream, `(batch_size, prefix_length)` int64 on the model's device."""
        return self._prefix_ids(batch_size, self.config.uncond_token_id)

    def _prefix_ids(self, batch_size: int, token_id: int) -> Tensor:
        # `self.device` is meta while accelerate keeps the weights elsewhere.
        device = execution_device(self.model.embed_tokens)
        return torch.full((batch_size, self.config.prefix_length), token_id, device=device)

    def image_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits over the codes alone, `(..., codebook_size)`."""
        return self.lm_head(hidden_states)

    def prepare_inputs_for_generation(self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs):
        """Positions follow columns, and the caption enters once, with the prefix."""
        cache = kwargs.get(CACHE_KEYWORD)
        past = 0 if cache is None else int(cache.get_seq_length())  # a static cache gives a live tensor
        length = input_ids.shape[1] if next_sequence_length is None else next_sequence_length
        start = past if next_sequence_length is not None or past else 0
        kwargs["position_ids"] = torch.arange(start, start + length, device=input_ids.device)[None]
        if start:
            kwargs["caption_embeds"] = None
        return super().prepare_inputs_for_generation(input_ids, next_sequence_length=next_sequence_length, **kwargs)

    def _validate_model_kwargs(self, model_kwargs: dict) -> None:
        """Older releases look for their name of the cache among the arguments of `forward`, which has the newer."""
        others = {name: value for name, value in model_kwargs.items() if name != CACHE_KEYWORD}
        super()._validate_model_kwargs(others)  # type: ignore[misc]  # transformers types it for another base

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        caption_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Predict the next code at every position.

        Args:
            input_ids: Prefix placeholders and codes, `(B, S)` int64.
            attention_mask: `(B, S)` for padding, or a prepared 4-D mask.
            position_ids: Positions, `(B, S)`; columns of the sequence when absent.
            cache: Keys and values of earlier positions.
            inputs_embeds: Embeddings in place of ids, `(B, S, hidden_size)`.
            caption_embeds: Caption features of the caption placeholders, `(B, S_c, caption_dim)`.
            labels: Next-token targets, `(B, S)`, -100 where there is none (shifted inside, as elsewhere in
                transformers).
            logits_to_keep: Compute logits of the last so many positions only; 0 for all.
            **kwargs: Passed to `transformers.LlamaModel.forward`.

        Returns:
            Logits `(B, S, vocab_size)`; prefix ids, which are never generated, hold the dtype's minimum.
            `hidden_states[-1]` is what the output layer reads.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            caption_embeds=caption_embeds,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        if not isinstance(logits_to_keep, int) or logits_to_keep:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden = hidden[:, keep]
        codes = self.image_logits(hidden)
        # The minimum, not -inf: guidance subtracts two of these, and inf - inf is NaN.
        specials = self.config.vocab_size - self.config.codebook_size
        logits = F.pad(codes, (0, specials), value=torch.finfo(codes.dtype).min)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(codes[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE_KEYWORD: getattr(outputs, CACHE_KEYWORD)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def interleaved_to_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a query or key projection from interleaved pairs to Llama's two halves.

    Args:
        weight: Projection `(num_heads * head_dim, hidden_size)` whose rotation pairs rows 2i and 2i + 1 of each head.
        num_heads: Heads in the projection.

    Returns:
        Same shape; the rotation now pairs rows i and i + head_dim / 2, and attention scores are unchanged.
    """
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


_PUBLISHED_NAMES = {
    "model.cls_embedding.cap_proj.": "model.prefix.",
    "model.cls_embedding.uncond_embedding": "model.prefix.uncond_embedding",
    "model.cls_embedding.embedding_table.": "model.prefix.class_embedding.",
}


def rename_published(key: str) -> str:
    """Give the name in `LlamaGenForConditionalGeneration` of a Hub-style tensor; most are the same."""
    return next((new + key[len(old) :] for old, new in _PUBLISHED_NAMES.items() if key.startswith(old)), key)


def convert_published_state_dict(state_dict: dict[str, Tensor], config: LlamaGenConfig) -> dict[str, Tensor]:
    """Rename and reorder Hub-style LlamaGen weights (`jadohu/LlamaGen-T2I`) for `LlamaGenForConditionalGeneration`.

    Args:
        state_dict: Published tensors, named as in that repository.
        config: Configuration of the model to load them into.

    Returns:
        A state dict for `load_state_dict(strict=True)`.
    """
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    converted = {}
    for key, value in state_dict.items():
        name = rename_published(key)
        rotated = next((count for suffix, count in heads.items() if key.endswith(suffix)), None)
        value = value if rotated is None else interleaved_to_halves(value, rotated)
        # Published models keep 120 unconditional rows whatever the prefix length; only the first are ever read.
        converted[name] = value[: config.prefix_length] if name.endswith("uncond_embedding") else value
    return converted


AutoModel.register(LlamaGenConfig, LlamaGenModel, exist_ok=True)
AutoModelForCausalLM.register(LlamaGenConfig, LlamaGenForConditionalGeneration, exist_ok=True)
