"""The transformers task `lantern-text-to-image`: prompts in, PIL images out, several tokens a pass.

`import lantern_hf` enters the task, and `transformers.pipeline` finds it. It prepares prompts, asks the model's own
`generate` with a head attached, and turns codes into pixels by the family's adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pipelines.base import Pipeline

from lantern_hf._pipeline_arguments import Parts, Wish, family_defaults, image_arguments, write_family
from lantern_hf._pipeline_checks import check_generator, check_output
from lantern_hf._pipeline_prompts import prompt_list
from lantern_hf._placement import read_weight
from lantern_hf.attach import LanternMixin, attach
from lantern_hf.candidates import CandidateTree, RootOnly
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftModel
from lantern_hf.images import decode_images
from lantern_hf.neighbor_cache import cached_neighbors
from lantern_hf.neighbors import NeighborTable
from lantern_hf.targets import adapter_class, adapter_for

__all__ = ["LanternTextToImagePipeline"]


class LanternTextToImagePipeline(Pipeline):
    """Text to image with any visual autoregressive model that an adapter serves.

    Args:
        model: The target. It gets attached (`lantern_hf.attach`), unless it is already.
        assistant: Draft head, its folder or Hub id. Without one, and none attached, images are decoded plainly.
        lantern_config: Default tree and acceptance rule.
        neighbors: Neighbour table, for heads that bring none and targets without a codebook.
        target_options: Options of the target's adapter, as in `lantern_generate`.
        text_encoder: For LlamaGen.
        vq_model: Decoder of pixels, for LlamaGen and other models that have none.
        **kwargs: As in every transformers pipeline: `processor`, `tokenizer`, `device`, `batch_size`, and settings of
            `generate` that hold for every call.

    Example:
        >>> import lantern_hf
        >>> from transformers import pipeline
        >>> pipe = pipeline(  # doctest: +SKIP
        ...     "lantern-text-to-image", model="Emu3-community/Emu3-Gen-hf", assistant="someone/emu3-lantern-head"
        ... )
        >>> pipe("a red fox", guidance_scale=3.0, seed=0).save("fox.png")  # doctest: +SKIP
    """

    # Which of them a model needs is its family's business; what is not there is missed when it is needed.
    _load_processor: Any = None
    _load_tokenizer: Any = None
    _load_image_processor: Any = False
    _load_feature_extractor: Any = False
    _load_video_processor: Any = False

    def __init__(
        self,
        model: PreTrainedModel,
        *args: Any,
        assistant: LanternDraftModel | CandidateTree | str | None = None,
        lantern_config: LanternConfig | Mapping[str, Any] | None = None,
        neighbors: NeighborTable | None = None,
        target_options: Mapping[str, Any] | None = None,
        text_encoder: Any = None,
        vq_model: Any = None,
        **kwargs: Any,
    ):
        super().__init__(model, *args, **kwargs)
        if isinstance(assistant, LanternDraftModel):
            assistant.place(model)
        if not isinstance(model, LanternMixin):
            attach(model, assistant, lantern_config, neighbors=neighbors, target_options=target_options)
        self._assistant, self._lantern_config, self._neighbors = assistant, lantern_config, neighbors
        options = dict(target_options or model.__dict__["_lantern"].target_options or {})
        # For good: saving a model writes its class over what told its family.
        self._options: dict[str, Any] = {"family": adapter_class(model, options.get("family")).family} | options
        if text_encoder is not None:
            text_encoder = text_encoder.to(self.device)
        self._parts = Parts(self.processor, self.tokenizer, text_encoder, vq_model)

    def __call__(  # type: ignore[override]
        self,
        inputs: str | Sequence[str] | Any,
        *,
        batch_size: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        num_images_per_prompt: int = 1,
        **kwargs: Any,
    ) -> Any:
        """Generate images.

        Args:
            inputs: Prompt, a list of prompts, or a generator or data set of them, read as images are asked for.
            batch_size: Prompts of a list that are decoded together. Default: the pipeline's, else all of them.
            seed: The n-th image of a call is drawn from this seed + n, whatever the batch size.
            generator: Source of every draw, or one per image; not with `seed`.
            num_images_per_prompt: Images of each prompt.
            **kwargs: `negative_prompt` (a text, or one a prompt), `height` and `width` in pixels where the family has a
                choice, `guidance_scale` (1 is off), `assistant`, `lantern_config` (None decodes plainly), `neighbors`,
                and everything else that `generate` takes: `top_k`, `temperature`, `do_sample`, `on_round`, ...

        Returns:
            A PIL image for a prompt, a list of them for a list; with `num_images_per_prompt` above 1, a list in place
            of each image. An iterator for a generator or data set.

        Raises:
            ValueError: An argument is out of range, or the model makes no images from prompts.
            TypeError: A prompt is no text, or `generator` no generator.
        """
        check_output("pil", num_images_per_prompt)
        if seed is not None and generator is not None:
            raise ValueError(f"`seed` and `generator` are two sources of randomness, got both (seed={seed}). Pass one.")
        if not isinstance(inputs, str | list | tuple):
            if isinstance(generator, Sequence):
                raise ValueError("A stream of prompts takes one `generator`, not a list of them.")
            kwargs |= {"generator": generator, "num_images_per_prompt": num_images_per_prompt}
            return self._stream(inputs, seed, num_images_per_prompt, kwargs)
        kwargs["num_images_per_prompt"] = num_images_per_prompt
        prompts = prompt_list(inputs)
        check_generator(generator, len(prompts) * num_images_per_prompt)
        params = self._all_parameters(kwargs)
        size = batch_size or self._batch_size or len(prompts)
        images: list[Any] = []
        for first in range(0, len(prompts), size):
            chosen = self._chunk(params, len(prompts), first, size, seed, generator)
            images += self.run_single(prompts[first : first + size], *chosen)
        return images[0] if isinstance(inputs, str) else images

    def _stream(self, prompts: Iterable[str], seed: int | None, count: int, kwargs: dict[str, Any]) -> Iterator[Any]:
        """Generate the images of each prompt when they are asked for."""
        for number, prompt in enumerate(prompts):
            yield self(prompt, seed=None if seed is None else seed + number * count, **kwargs)

    def _all_parameters(self, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        """Parameters of this call on top of the pipeline's own."""
        own = (self._preprocess_params, self._forward_params, self._postprocess_params)
        return [before | now for before, now in zip(own, self._sanitize_parameters(**kwargs), strict=True)]

    def _chunk(
        self, params: list[dict[str, Any]], count: int, first: int, size: int, seed: int | None, generator: Any
    ) -> list[dict[str, Any]]:
        """Parameters of some prompts: their own negative prompts and generators."""
        before, forward, after = (dict(each) for each in params)
        negative, each = before.get("negative_prompt"), after.get("num_images_per_prompt", 1)
        if negative is not None and not isinstance(negative, str):
            if len(negative) != count:
                raise ValueError(
                    f"`negative_prompt` has {len(negative)} texts for {count} prompts. Pass one, or one a prompt."
                )
            before["negative_prompt"] = list(negative[first : first + size])
        rows = range(first * each, min(first + size, count) * each)
        if seed is not None:
            forward["generator"] = [torch.Generator(self.device).manual_seed(seed + row) for row in rows]
        elif isinstance(generator, Sequence):
            forward["generator"] = [generator[row] for row in rows]
        elif generator is not None:
            forward["generator"] = generator
        return [before, forward, after]

    def _sanitize_parameters(
        self,
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Say which step takes which argument."""
        before: dict[str, Any] = {"negative_prompt": negative_prompt, "height": height, "width": width}
        before |= {"guidance_scale": guidance_scale}
        after = {"num_images_per_prompt": num_images_per_prompt}
        if num_images_per_prompt is not None:
            generate_kwargs["num_return_sequences"] = num_images_per_prompt
        set_only = [{name: value for name, value in part.items() if value is not None} for part in (before, after)]
        return set_only[0], generate_kwargs, set_only[1]

    def preprocess(  # type: ignore[override]
        self,
        prompts: list[str],
        negative_prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
    ) -> dict[str, Any]:
        """Turn prompts into arguments of `generate`."""
        adapter_for(self.model, **self._options).check_decoder(self._parts.vq_model)
        scale = self._guidance(guidance_scale)
        negative = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else negative_prompt
        wish = Wish(prompts, negative, scale, height, width)
        arguments = image_arguments(self.model, self._parts, wish, self._options)
        return {"arguments": arguments, "guidance_scale": scale}

    @property
    def _usual(self) -> dict[str, Any]:
        """Settings of the family."""
        return family_defaults(self.model, self._options)

    def _guidance(self, scale: float | None) -> float:
        """Guidance scale in force: the user's, the model's, the family's."""
        given = (scale, self.model.generation_config.guidance_scale)
        return next((one for one in given if one is not None), self._usual.get("guidance_scale", 1.0))

    def _forward(  # type: ignore[override]
        self,
        inputs: dict[str, Any],
        assistant: Any = None,
        lantern_config: Any = "default",
        neighbors: Any = None,
        **generate_kwargs: Any,
    ) -> dict[str, Any]:
        """Decode the images of a batch of prompts."""
        arguments = dict(inputs["arguments"])
        num_tokens, _ = arguments.pop("max_new_tokens"), arguments.pop("guidance_scale", None)  # settings, not inputs
        head, config = self._draft(assistant, lantern_config)
        model: Any = self.model
        output = model.generate(
            **arguments,
            **self._settings(generate_kwargs, num_tokens, inputs["guidance_scale"]),
            assistant=head,
            lantern_config=config,
            neighbors=self._table(neighbors, head, config),
            target_options=self._options,
        )
        sequences = output if isinstance(output, Tensor) else output.sequences
        return {"sequences": sequences, "prompts": arguments["input_ids"]}

    def _settings(self, user: dict[str, Any], num_tokens: int, scale: float) -> dict[str, Any]:
        """Arguments of `generate` from the user, and what neither the user nor the model's generation config says."""
        config = user.get("generation_config")
        known = self.model.generation_config.to_diff_dict() | ({} if config is None else config.to_diff_dict()) | user
        usual = {"do_sample": True} | self._usual
        added = {name: value for name, value in usual.items() if name not in known} | {"guidance_scale": scale}
        if not (added | known).get("do_sample"):
            added.pop("top_k", None)
        settings = {"max_new_tokens": num_tokens} | added | user
        if config is None:
            return settings
        settings["generation_config"] = config = copy.deepcopy(config)
        return config.update(**settings) | {"generation_config": config}

    def _draft(self, assistant: Any, config: Any) -> tuple[Any, Any]:
        """What drafts, and how: the head of the call, the pipeline or the model; else nothing (plain decoding)."""
        if config is None:
            return RootOnly(1), None
        asked, config = config != "default", self._lantern_config if config == "default" else config
        heads = (assistant, self._assistant, self.model.__dict__["_lantern"].assistant)
        head = next((one for one in heads if one is not None), None)
        if head is None and asked:
            raise ValueError(
                "`lantern_config` was given, but there is no draft head. Pass assistant=head, its folder or its Hub id."
            )
        return (RootOnly(1), None) if head is None else (head, config)

    def _table(self, given: NeighborTable | None, head: Any, config: Any) -> NeighborTable | None:
        """The table of the call or the pipeline; else, where the head brings none, one over the VQ model's codebook."""
        given = self._neighbors if given is None else given
        vq_model = self._parts.vq_model
        if given is not None or vq_model is None or getattr(head, "neighbors", None) is not None:
            return given
        if isinstance(head, RootOnly) or config is None or (config := LanternConfig.resolve(config)).is_strict:
            return None
        return cached_neighbors(read_weight(vq_model.quantize.embedding).float(), config.neighborhood_size)

    def postprocess(self, outputs: dict[str, Any], num_images_per_prompt: int = 1) -> list[Any]:  # type: ignore[override]
        """Turn tokens into images: one a prompt, or a list a prompt."""
        prompts, vq_model = outputs["prompts"].repeat_interleave(num_images_per_prompt, 0), self._parts.vq_model
        rows = decode_images(self.model, prompts, outputs["sequences"], vq_model, target_options=self._options)
        if unfinished := [row for row in rows if not row]:
            raise ValueError(
                f"{len(unfinished)} of {len(rows)} images are not complete. Leave out `max_new_tokens` and stopping "
                "criteria, so that every image gets all of its tokens."
            )
        images: list[Any] = [row[0] for row in rows]
        if num_images_per_prompt > 1:
            images = [images[i : i + num_images_per_prompt] for i in range(0, len(images), num_images_per_prompt)]
        return images

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save model and processor, as `pipeline(..., model=save_directory)` reads them; a head is saved by itself."""
        super().save_pretrained(save_directory, **kwargs)
        write_family(save_directory, self._options["family"])
        if self.processor is not None:
            self.processor.save_pretrained(save_directory)
