"""`LanternPipeline`: prompts to images in the manner of diffusers, for every family of targets that draws.

It turns prompts into arguments of `generate`, lets `lantern_generate` decode the codes, and turns these into pixels;
what differs between families is their adapter's. It saves, loads and pushes as every `DiffusionPipeline` does, draft
head and neighbour table included. The decoding itself is `strategy.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import PIL.Image
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vq_model import VQModel
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lantern_hf._pipeline_arguments import Wish, image_arguments
from lantern_hf._pipeline_canvas import Canvas
from lantern_hf._pipeline_checks import (
    TENSOR_INPUTS,
    check_callback,
    check_generator,
    check_output,
    check_parts,
    check_sampling,
    check_sizes,
)
from lantern_hf._pipeline_hub import PipelineHubMixin
from lantern_hf._pipeline_progress import DecodingProgress
from lantern_hf._pipeline_prompts import one_an_image, prompt_list
from lantern_hf._placement import is_moved_as_a_whole
from lantern_hf._wrappers import unwrap
from lantern_hf.assets import embedded_model_path
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftModel
from lantern_hf.models import llamagen  # noqa: F401  diffusers loads a part only if its module has been imported
from lantern_hf.stats import DecodingStats
from lantern_hf.targets import adapter_for

__all__ = ["LanternPipeline", "LanternPipelineOutput", "embedded_pipeline"]


@dataclass
class LanternPipelineOutput(ImagePipelineOutput):
    """What a `LanternPipeline` gives.

    Args:
        images: PIL images, `(B, H, W, 3)` array or `(B, 3, H, W)` tensor in [0, 1], or the codes with `"latent"`.
        stats: Passes, accepted lengths, `relaxed_tv`, seconds of the decoding.
        codes: Codes of the images, `(B, h, w)` int64; a list of `(h, w)` where sizes differ.
    """

    images: list[PIL.Image.Image] | np.ndarray | Tensor | list[Tensor]  # type: ignore[assignment]
    stats: DecodingStats | None = None
    codes: Tensor | list[Tensor] | None = None


class LanternPipeline(PipelineHubMixin):
    """Text (or class) to image with any visual autoregressive model that an adapter serves, several tokens a pass.

    Load a saved one with `from_pretrained`, make one of a target that is loaded already with `from_target`.

    Args:
        transformer: The target.
        vq_model: Turns codes into pixels, where the target does not itself (LlamaGen, Anole, Lumina-mGPT).
        tokenizer: For text, where the target has no `processor`; padding on either side.
        text_encoder: For LlamaGen's text.
        draft_head: Draft head of the target. Without one the pipeline decodes plainly, one token a pass.
        guidance_scale: Default guidance scale of a call. By default that of the target's generation config, or the
            family's published one.
        top_k: Default `top_k` of a call; 0 is off. By default as `guidance_scale`.
        processor: For text, where the target has one (Emu3, Janus, GLM-Image).
        target_options: Options of the target's adapter, as in `lantern_generate`.
        lantern_config: Default tree and acceptance rule. By default the head's.

    Raises:
        ValueError: The parts do not fit one another, or the target draws no images.

    Example:
        >>> from lantern_hf import LanternPipeline
        >>> pipe = LanternPipeline.from_pretrained("someone/llamagen-lantern")  # doctest: +SKIP
        >>> pipe("a red fox", generator=torch.Generator().manual_seed(0)).images[0]  # doctest: +SKIP
    """

    model_cpu_offload_seq = "text_encoder->transformer->vq_model"  # type: ignore[assignment]
    # The head takes turns with the transformer many times an image, so offloading it would move both each time.
    _exclude_from_cpu_offload = ["draft_head"]
    _optional_components = ["vq_model", "tokenizer", "text_encoder", "draft_head", "processor"]
    _callback_tensor_inputs = list(TENSOR_INPUTS)

    def __init__(
        self,
        transformer: PreTrainedModel,
        vq_model: VQModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: PreTrainedModel | None = None,
        draft_head: LanternDraftModel | None = None,
        guidance_scale: float | None = None,
        top_k: int | None = None,
        processor: ProcessorMixin | None = None,
        target_options: Mapping[str, Any] | None = None,
        lantern_config: LanternConfig | Mapping[str, Any] | None = None,
    ):
        super().__init__()
        target, options = unwrap(transformer), dict(target_options or {})
        adapter = adapter_for(target, **options)
        options = {"family": adapter.family} | options  # for good: saving a model writes its class over what told it
        check_parts(adapter, vq_model, text_encoder)
        if draft_head is not None:
            draft_head.bind(target)
        self.register_modules(
            transformer=transformer,
            vq_model=vq_model,
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            draft_head=draft_head,
            processor=processor,
        )
        usual = {"guidance_scale": 1.0, "top_k": 0} | dict(adapter.defaults) | self._own_settings
        self.register_to_config(
            guidance_scale=usual["guidance_scale"] if guidance_scale is None else guidance_scale,
            top_k=usual["top_k"] if top_k is None else top_k,
            target_options=options,
            lantern_config=None if lantern_config is None else LanternConfig.resolve(lantern_config).to_dict(),
        )
        self.image_processor = VaeImageProcessor(do_resize=False)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        class_labels: int | Sequence[int] | Tensor | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        height: int | Sequence[int] | None = None,
        width: int | Sequence[int] | None = None,
        num_images_per_prompt: int = 1,
        guidance_scale: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
        do_sample: bool = True,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        lantern_config: LanternConfig | Mapping[str, Any] | Literal["default"] | None = "default",
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("image_tokens",),
    ) -> LanternPipelineOutput | tuple[Any, DecodingStats | None, Any]:
        """Generate images.

        Args:
            prompt: Text, or several, of a text-conditional model.
            class_labels: Label, or several, of a class-conditional model.
            negative_prompt: Text, or one a prompt, to guide away from, where the family takes one.
            height: Height in pixels, or one a prompt, where the family has a choice. Default: the family's.
            width: Width in pixels.
            num_images_per_prompt: Images of each prompt; they come next to one another.
            guidance_scale: Classifier-free guidance, at least 1, which is off. Default: the pipeline's.
            top_k: Codes to draw from; 0 is all. Default: the pipeline's.
            top_p: Smallest probability mass to draw from, in (0, 1]. Default: the target's generation config, or 1.
            temperature: Softmax temperature, above 0. Default: as `top_p`.
            do_sample: Draw codes; otherwise take the most probable one each time.
            generator: Source of every draw, or one per image. Default: the global one.
            lantern_config: Tree and acceptance rule. `"default"`: the pipeline's, or the head's own, or LANTERN++ with
                10 neighbours and `lam=2`; plain decoding if there is no head. None: plain decoding, one token a pass,
                guidance in one batch.
            output_type: `"pil"`, `"np"`, `"pt"`, or `"latent"` for the codes.
            return_dict: Return a `LanternPipelineOutput`, otherwise the tuple `(images, stats, codes)`.
            callback_on_step_end: Called after every target pass as `callback(pipe, step, timestep, tensors)`: number of
                the pass, tokens decoded so far over all images, and what is named below. What it returns is not read.
            callback_on_step_end_tensor_inputs: `"image_tokens"`, the codes `(B, h * w)` int64 with -1 for what is still
                to come, and `"image"`, `(B, 3, H, W)` in [0, 1], the codes to come filled with the commonest one of the
                image. Where sizes differ, the codes are those of the largest image, and `"image"` is a list.

        Returns:
            Images, statistics and codes.

        Raises:
            ValueError: An argument is out of range, a prompt is empty or too long, or the model needs another input.
            TypeError: `prompt` holds no text, or `generator` no generator.
        """
        sampling = self._sampling(guidance_scale, top_k, top_p, temperature)
        check_output(output_type, num_images_per_prompt)
        self._check_drawing(output_type, callback_on_step_end, callback_on_step_end_tensor_inputs)
        config = self._resolve_config(lantern_config)
        wish = self._wish(prompt, class_labels, negative_prompt, (height, width), num_images_per_prompt, generator)
        wish.guidance_scale = sampling["guidance_scale"]
        arguments = image_arguments(self._target, self._parts, wish, self._options)
        canvas = Canvas(self._target, arguments, self.vq_model, self._options)
        check_sizes(canvas.sizes, output_type)
        bound = None if callback_on_step_end is None else partial(callback_on_step_end, self)
        picture = partial(canvas.draw, image_processor=self.image_processor, output_type="pt")
        with self.progress_bar(total=len(canvas.sizes) * canvas.num_tokens) as bar:
            progress = DecodingProgress(canvas, bar, bound, callback_on_step_end_tensor_inputs, picture)
            settings = sampling if do_sample else {"guidance_scale": sampling["guidance_scale"]}
            result = self._generate(arguments | settings | {"do_sample": do_sample}, config, generator, progress)
            progress.finish()
        grids = canvas.finished(result.sequences)
        codes = canvas.draw(grids, self.image_processor, "latent")
        images = codes if output_type == "latent" else canvas.draw(grids, self.image_processor, output_type)
        self.maybe_free_model_hooks()
        if not return_dict:
            return images, result.stats, codes
        return LanternPipelineOutput(images=images, stats=result.stats, codes=codes)

    def enable_progress(self, enabled: bool = True) -> None:
        """Show the bar over decoded tokens, with tokens a pass so far, or hide it.

        It moves by the tokens that a pass accepted. What else `set_progress_bar_config` was told stays.

        Args:
            enabled: Whether to show it.
        """
        settings = {**getattr(self, "_progress_bar_config", {}), "disable": not enabled}
        self.set_progress_bar_config(**settings)

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
        adapter = self._adapter
        by_class = adapter.asks == "class_labels"
        if (prompt if by_class else class_labels) is not None or prompt is class_labels:
            raise ValueError(f"This model draws from `{adapter.asks}`: pass that, and nothing else to draw from.")
        if by_class:
            return adapter.encode_classes(class_labels)["input_ids"]
        prompts = prompt_list(prompt)
        adapter.check_prompts(self._parts.reader, prompts)
        return prompts

    def _sampling(
        self, guidance_scale: float | None, top_k: int | None, top_p: float | None, temperature: float | None
    ) -> dict[str, Any]:
        """Settle how codes are drawn: as the user says, the pipeline, the target's generation config."""
        own = {"top_p": 1.0, "temperature": 1.0} | self._own_settings
        settings: dict[str, Any] = {
            "guidance_scale": self.config.guidance_scale if guidance_scale is None else guidance_scale,
            "top_k": self.config.top_k if top_k is None else top_k,
            "top_p": own["top_p"] if top_p is None else top_p,
            "temperature": own["temperature"] if temperature is None else temperature,
        }
        check_sampling(**settings)
        return settings | {"guidance_scale": float(settings["guidance_scale"])}

    def _check_drawing(self, output_type: str, callback: Any, names: Sequence[str]) -> None:
        """Refuse pictures, wanted in the end or on the way, that cannot be drawn."""
        if callback is not None:
            check_callback(callback, names, self.vq_model is not None and is_moved_as_a_whole(self.vq_model))
        if output_type != "latent" or (callback is not None and "image" in names):
            self._adapter.check_decoder(self.vq_model)

    def _wish(self, prompt: Any, labels: Any, negative: Any, size: tuple[Any, Any], each: int, generator: Any) -> Wish:
        """Check what is to be drawn, and put it down image by image."""
        checked = self.check_inputs(prompt, labels)
        count = len(checked)
        check_generator(generator, count * each)
        if isinstance(checked, Tensor):
            classes = torch.as_tensor(labels).reshape(-1).repeat_interleave(each)
            return Wish(None, one_an_image("negative_prompt", negative, count, each), 1.0, labels=classes)
        texts = [text for text in checked for _ in range(each)]
        # One size for all stays one number: there are families that take no other.
        height, width = (
            side if isinstance(side, int) else one_an_image(name, side, count, each)
            for name, side in zip(("height", "width"), size, strict=True)
        )
        return Wish(texts, one_an_image("negative_prompt", negative, count, each), 1.0, height, width)


def embedded_pipeline(**kwargs: Any) -> LanternPipeline:
    """Load the embedded emoji model; keyword arguments as `LanternPipeline.from_pretrained`.

    Raises:
        FileNotFoundError: This installation came without it.
    """
    return LanternPipeline.from_pretrained(embedded_model_path(), **kwargs)
