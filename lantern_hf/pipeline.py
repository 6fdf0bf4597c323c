"""`LanternPipeline`: prompts to images in the manner of diffusers, for LlamaGen and models of its kind.

It encodes the prompt, lets `lantern_generate` decode the codes, and turns these into pixels. It saves, loads and pushes
as every `DiffusionPipeline` does, draft head and neighbour table included. The decoding itself is `strategy.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import PIL.Image
import torch
from accelerate.hooks import CpuOffload
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vq_model import VQModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lantern_hf._pipeline_checks import (
    TENSOR_INPUTS,
    check_callback,
    check_generator,
    check_output,
    check_parts,
    check_sampling,
)
from lantern_hf._pipeline_hub import PipelineHubMixin
from lantern_hf._pipeline_progress import DecodingProgress
from lantern_hf._pipeline_prompts import check_lengths, class_ids, encode_prompts, prompt_list
from lantern_hf._placement import read_weight
from lantern_hf.assets import embedded_model_path
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftModel
from lantern_hf.models.llamagen import LlamaGenForConditionalGeneration
from lantern_hf.models.vq import decode_codes
from lantern_hf.neighbor_cache import cached_neighbors
from lantern_hf.neighbors import NeighborTable
from lantern_hf.outputs import LanternGenerateOutput
from lantern_hf.stats import DecodingStats
from lantern_hf.strategy import lantern_generate

__all__ = ["LanternPipeline", "LanternPipelineOutput", "embedded_pipeline"]


@dataclass
class LanternPipelineOutput(ImagePipelineOutput):
    """What a `LanternPipeline` gives.

    Args:
        images: PIL images, `(B, H, W, 3)` array or `(B, 3, H, W)` tensor in [0, 1], or the codes with `"latent"`.
        stats: Passes, accepted lengths, `relaxed_tv`, seconds of the decoding.
        codes: Codes of the images, `(B, h, w)` int64.
    """

    images: list[PIL.Image.Image] | np.ndarray | Tensor  # type: ignore[assignment]
    stats: DecodingStats | None = None
    codes: Tensor | None = None


class LanternPipeline(PipelineHubMixin, DiffusionPipeline):
    """Text (or class) to image with a LlamaGen transformer, several tokens a pass.

    Args:
        transformer: The target.
        vq_model: Turns codes into pixels; its codebook is the one the target draws from.
        tokenizer: For text; padding on either side.
        text_encoder: For text.
        draft_head: Draft head of the target. Without one the pipeline decodes plainly, one token a pass.
        guidance_scale: Default guidance scale of a call.
        top_k: Default `top_k` of a call; 0 is off.

    Raises:
        ValueError: The parts do not fit one another.

    Example:
        >>> from lantern_hf import LanternPipeline
        >>> pipe = LanternPipeline.from_pretrained("someone/llamagen-lantern")  # doctest: +SKIP
        >>> pipe("a red fox", generator=torch.Generator().manual_seed(0)).images[0]  # doctest: +SKIP
    """

    model_cpu_offload_seq = "text_encoder->transformer->vq_model"  # type: ignore[assignment]
    # The head takes turns with the transformer many times an image, so offloading it would move both each time.
    _exclude_from_cpu_offload = ["draft_head"]
    _optional_components = ["tokenizer", "text_encoder", "draft_head"]
    _callback_tensor_inputs = list(TENSOR_INPUTS)

    config: Any
    transformer: LlamaGenForConditionalGeneration
    vq_model: VQModel
    tokenizer: PreTrainedTokenizerBase | None
    text_encoder: PreTrainedModel | None
    draft_head: LanternDraftModel | None

    def __init__(
        self,
        transformer: LlamaGenForConditionalGeneration,
        vq_model: VQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: PreTrainedModel | None = None,
        draft_head: LanternDraftModel | None = None,
        guidance_scale: float = 7.5,
        top_k: int = 0,
    ):
        super().__init__()
        check_parts(transformer, vq_model, text_encoder)
        if draft_head is not None:
            draft_head.bind(transformer)
        self.register_modules(
            transformer=transformer,
            vq_model=vq_model,
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            draft_head=draft_head,
        )
        self.register_to_config(guidance_scale=guidance_scale, top_k=top_k)
        self.image_processor = VaeImageProcessor(do_resize=False)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        class_labels: int | Sequence[int] | Tensor | None = None,
        num_images_per_prompt: int = 1,
        guidance_scale: float | None = None,
        top_k: int | None = None,
        top_p: float = 1.0,
        temperature: float = 1.0,
        do_sample: bool = True,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        lantern_config: LanternConfig | Mapping[str, Any] | Literal["default"] | None = "default",
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("image_tokens",),
    ) -> LanternPipelineOutput | tuple[Any, DecodingStats | None, Tensor]:
        """Generate images.

        Args:
            prompt: Text, or several, of a text-conditional model.
            class_labels: Label, or several, of a class-conditional model.
            num_images_per_prompt: Images of each prompt; they come next to one another.
            guidance_scale: Classifier-free guidance, at least 1, which is off. Default: the pipeline's.
            top_k: Codes to draw from; 0 is all. Default: the pipeline's.
            top_p: Smallest probability mass to draw from, in (0, 1].
            temperature: Softmax temperature, above 0.
            do_sample: Draw codes; otherwise take the most probable one each time.
            generator: Source of every draw, or one per image. Default: the global one.
            lantern_config: Tree and acceptance rule. `"default"`: the head's own, or LANTERN++ with 10 neighbours and
                `lam=2`; plain decoding if there is no head. None: plain decoding, one token a pass, guidance in one
                batch.
            output_type: `"pil"`, `"np"`, `"pt"`, or `"latent"` for the codes.
            return_dict: Return a `LanternPipelineOutput`, otherwise the tuple `(images, stats, codes)`.
            callback_on_step_end: Called after every target pass as `callback(pipe, step, timestep, tensors)`: number of
                the pass, codes decoded so far over all images, and what is named below. What it returns is not read.
            callback_on_step_end_tensor_inputs: `"image_tokens"`, `(B, h * w)` int64 with -1 for what is still to come,
                and `"image"`, `(B, 3, H, W)` in [0, 1], the codes to come filled with the commonest one of the image.

        Returns:
            Images, statistics and codes.

        Raises:
            ValueError: An argument is out of range, a prompt is empty or too long, or the model needs another input.
            TypeError: `prompt` holds no text, or `generator` no generator.
        """
        guidance_scale = self.config.guidance_scale if guidance_scale is None else guidance_scale
        top_k = self.config.top_k if top_k is None else top_k
        check_sampling(guidance_scale, top_k, top_p, temperature)
        sampling = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
        check_output(output_type, num_images_per_prompt)
        if callback_on_step_end is not None:
            offloaded = isinstance(getattr(self.vq_model, "_hf_hook", None), CpuOffload)
            check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs, offloaded)
        config = self._resolve_config(lantern_config)
        inputs = self._prepare(prompt, class_labels, num_images_per_prompt, generator)
        if guidance_scale > 1:
            inputs |= self._unconditional(inputs)
        with self.progress_bar(total=len(inputs["input_ids"]) * self._num_tokens) as bar:
            result = self._generate(
                inputs | {"guidance_scale": float(guidance_scale), "do_sample": do_sample},
                sampling if do_sample else {},
                config,
                generator,
                self._progress(bar, callback_on_step_end, callback_on_step_end_tensor_inputs),
            )
        height, width = self.transformer.config.grid_size
        codes = result.sequences[:, -height * width :].reshape(-1, height, width)
        images = codes if output_type == "latent" else self._pixels(codes, output_type)
        self.maybe_free_model_hooks()
        if not return_dict:
            return images, result.stats, codes
        return LanternPipelineOutput(images=images, stats=result.stats, codes=codes)

    @property
    def _num_tokens(self) -> int:
        """Tokens of one image."""
        return self.transformer.config.num_image_tokens

    def _resolve_config(self, value: LanternConfig | Mapping[str, Any] | str | None) -> LanternConfig | None:
        """Settle how to decode; None is plainly."""
        if value is None or (value == "default" and self.draft_head is None):
            return None
        if self.draft_head is None:
            raise ValueError(
                "`lantern_config` was given, but this pipeline has no draft head. Load it with "
                "LanternPipeline.from_pretrained(..., draft_head=head), or pass lantern_config=None to decode plainly."
            )
        if isinstance(value, str) and value != "default":
            raise ValueError(f"`lantern_config` must be a LanternConfig, a dict, None or 'default', got {value!r}.")
        return LanternConfig.resolve(self.draft_head.config.lantern_config if isinstance(value, str) else value)

    def check_inputs(self, prompt: Any = None, class_labels: Any = None) -> list[str] | Tensor:
        """Check what is to be drawn, without drawing it.

        Args:
            prompt: As in a call.
            class_labels: As in a call.

        Returns:
            The prompts, or the prefix ids of the classes, `(B, 1)`.

        Raises:
            ValueError: A prompt is empty or too long, a label out of range, or the model needs the other of the two.
            TypeError: `prompt` holds no text.
        """
        config = self.transformer.config
        if (prompt if config.conditioning == "class" else class_labels) is not None or prompt is class_labels:
            wanted = "class_labels" if config.conditioning == "class" else "prompt"
            raise ValueError(f"This model draws from `{wanted}`: pass that, and nothing else to draw from.")
        if config.conditioning == "class":
            return class_ids(class_labels, config.num_classes, config.codebook_size)
        if self.tokenizer is None or self.text_encoder is None:
            raise ValueError(
                "This model reads text, but the pipeline has no `tokenizer` or no `text_encoder`. Load it with both."
            )
        prompts = prompt_list(prompt)
        check_lengths(self.tokenizer, prompts, config.prefix_length)
        return prompts

    def _prepare(self, prompt: Any, labels: Any, num_images: int, generator: Any) -> dict[str, Tensor]:
        """Check the conditioning and turn it into arguments of `generate`, one row an image."""
        config, device = self.transformer.config, self._execution_device
        checked = self.check_inputs(prompt, labels)
        check_generator(generator, len(checked) * num_images)
        if isinstance(checked, Tensor):
            return {"input_ids": checked.to(device).repeat_interleave(num_images, 0)}
        tokenizer, encoder = cast(Any, self.tokenizer), cast(Any, self.text_encoder)  # there, says the check
        features, mask = encode_prompts(tokenizer, encoder, checked, config.prefix_length, device)
        mask = mask.repeat_interleave(num_images, 0)
        return {
            "input_ids": self.transformer.caption_ids(len(mask)).to(device),
            "attention_mask": mask,
            "caption_embeds": features.to(self.transformer.dtype).repeat_interleave(num_images, 0),
        }

    def _unconditional(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The unconditional prompt: the learned prefix under the caption's own mask, or the extra class."""
        ids = self.transformer.unconditional_ids(len(inputs["input_ids"])).to(inputs["input_ids"].device)
        mask = inputs.get("attention_mask")
        return {"negative_prompt_ids": ids} | ({} if mask is None else {"negative_prompt_attention_mask": mask})

    def _generate(
        self,
        inputs: dict[str, Any],
        sampling: dict[str, Any],
        config: LanternConfig | None,
        generator: Any,
        progress: DecodingProgress,
    ) -> LanternGenerateOutput:
        """Decode the codes of all images."""
        hook = getattr(self.transformer, "_hf_hook", None)
        if isinstance(hook, CpuOffload):  # the loop calls the transformer's parts, which would not wake it
            hook.pre_forward(self.transformer)
        # The class's own `generate`: an attached transformer has one that would look for its own head.
        return LlamaGenForConditionalGeneration.generate(
            self.transformer,
            **inputs,
            **sampling,
            custom_generate=lantern_generate,
            assistant=None if config is None else self.draft_head,
            lantern_config=config,
            neighbors=self._neighbors(config),
            generator=generator,
            on_round=progress,
            max_new_tokens=self._num_tokens,
            return_dict_in_generate=True,
        )

    def _progress(self, bar: Any, callback: Callable[..., Any] | None, names: Sequence[str]) -> DecodingProgress:
        """What the decoding loop calls after every round."""
        bound = None if callback is None else partial(callback, self)
        grid = self.transformer.config.grid_size
        return DecodingProgress(
            self._num_tokens, bar, bound, names, lambda codes: self._pixels(codes.view(-1, *grid), "pt")
        )

    def _neighbors(self, config: LanternConfig | None) -> NeighborTable | None:
        """The head's neighbour table, made from the codebook where the head has none that serves."""
        if config is None or config.is_strict:
            return None
        assert self.draft_head is not None
        table = self.draft_head.neighbors
        codebook = read_weight(self.vq_model.quantize.embedding)
        if table is not None and not codebook.is_meta:  # weights offloaded by other means cannot be compared
            table.check(codebook)
        if config.neighborhood_size >= len(codebook):
            raise ValueError(
                f"`neighborhood_size` must be below {len(codebook)}, the codes of this model, got "
                f"{config.neighborhood_size}. Try 10."
            )
        if table is None or table.k < config.neighborhood_size:
            table = self.draft_head.neighbors = cached_neighbors(codebook.float(), config.neighborhood_size)
        return table

    def _pixels(self, codes: Tensor, output_type: str) -> Any:
        """Turn codes `(B, h, w)` into images."""
        return self.image_processor.postprocess(decode_codes(self.vq_model, codes), output_type=output_type)


def embedded_pipeline(**kwargs: Any) -> LanternPipeline:
    """Load the embedded emoji model; keyword arguments as `LanternPipeline.from_pretrained`.

    Raises:
        FileNotFoundError: This installation came without it.
    """
    return LanternPipeline.from_pretrained(embedded_model_path(), **kwargs)
