"""The target of a `LanternPipeline`: taken over as it is loaded, asked for its adapter, decoded with a head or not."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from diffusers.models.autoencoders.vq_model import VQModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lantern_hf._pipeline_arguments import Parts, own_settings
from lantern_hf._pipeline_progress import DecodingProgress
from lantern_hf._placement import read_weight, wake
from lantern_hf._wrappers import unwrap
from lantern_hf.attach import attachment, run_generate
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftModel
from lantern_hf.neighbor_cache import cached_neighbors
from lantern_hf.neighbors import NeighborTable
from lantern_hf.outputs import LanternGenerateOutput
from lantern_hf.resolve import load_head
from lantern_hf.strategy import lantern_generate
from lantern_hf.targets import TargetAdapter, adapter_for

__all__ = ["PipelineTargetMixin"]


class PipelineTargetMixin(DiffusionPipeline):
    """What `LanternPipeline` does with its target."""

    config: Any
    transformer: Any  # families add attributes that PreTrainedModel does not declare
    vq_model: Any
    tokenizer: PreTrainedTokenizerBase | None
    text_encoder: PreTrainedModel | None
    draft_head: LanternDraftModel | None
    processor: ProcessorMixin | None

    @classmethod
    def from_target(
        cls,
        model: PreTrainedModel,
        processor: Any = None,
        head: LanternDraftModel | str | PathLike[str] | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: PreTrainedModel | None = None,
        vq_model: VQModel | None = None,
        guidance_scale: float | None = None,
        top_k: int | None = None,
        target_options: Mapping[str, Any] | None = None,
        lantern_config: LanternConfig | Mapping[str, Any] | None = None,
    ) -> Any:
        """Make a pipeline of a target that is loaded already, wherever it is: nothing is copied or moved.

        Args:
            model: The target; spread over devices, offloaded, quantised or attached as it may be.
            processor: Its processor, or its tokenizer.
            head: Draft head, its folder or Hub id, which is loaded next to the target's last layer. Default: the one
                that the target is attached with; without any the pipeline decodes plainly.
            tokenizer: For LlamaGen, or where `processor` has none.
            text_encoder: For LlamaGen.
            vq_model: Decoder of pixels, for families whose model has none.
            guidance_scale: As in the constructor.
            top_k: As in the constructor.
            target_options: As in the constructor. Default: those that the target is attached with.
            lantern_config: As in the constructor. Default: as `target_options`.

        Returns:
            The pipeline.

        Raises:
            ValueError: The parts do not fit one another, or the target draws no images.
            TypeError: `head` is no draft head, or `model` no transformers model.

        Example:
            >>> pipe = LanternPipeline.from_target(model, processor, "someone/emu3-lantern-head")  # doctest: +SKIP
            >>> pipe("a red fox", height=720, width=720).images[0]  # doctest: +SKIP
        """
        target, state = unwrap(model), attachment(model)
        if head is None and state is not None:
            head = state.head(None, target)
        if isinstance(head, str | PathLike):
            head = load_head(str(head), target)
        if head is not None and not isinstance(head, LanternDraftModel):
            raise TypeError(
                f"`head` must be a LanternDraftModel, its folder or its Hub id, got {type(head).__name__}. Another "
                "generator of candidates goes to model.generate(assistant=...) of an attached model."
            )
        if state is not None:
            target_options = target_options or state.target_options
            lantern_config = state.lantern_config if lantern_config is None else lantern_config
            if head is not None and head.neighbors is None:
                head.neighbors = state.neighbors
        if isinstance(processor, PreTrainedTokenizerBase):
            processor, tokenizer = None, processor
        make: Any = cls  # whose constructor is that of `LanternPipeline`
        return make(
            model,
            vq_model=vq_model,
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            draft_head=head,
            guidance_scale=guidance_scale,
            top_k=top_k,
            processor=processor,
            target_options=target_options,
            lantern_config=lantern_config,
        )

    @property
    def _target(self) -> Any:
        """The target itself, where the component wraps it, as `torch.compile` does."""
        return unwrap(self.transformer)

    @property
    def _options(self) -> dict[str, Any]:
        """Options of the target's adapter."""
        return dict(self.config.target_options or {})

    @property
    def _adapter(self) -> TargetAdapter:
        """The target's adapter, before any prompt is known."""
        return adapter_for(self._target, **self._options)

    @property
    def _parts(self) -> Parts:
        """What there is beside the target."""
        return Parts(self.processor, self.tokenizer, self.text_encoder, self.vq_model)

    @property
    def _own_settings(self) -> dict[str, Any]:
        """Settings of `generate` that the target's generation config names."""
        return own_settings(self._target)

    def _resolve_config(self, value: LanternConfig | Mapping[str, Any] | str | None) -> LanternConfig | None:
        """Settle how to decode; None is plainly."""
        if value is None or (value == "default" and self.draft_head is None):
            return None
        if self.draft_head is None:
            raise ValueError(
                "`lantern_config` was given, but this pipeline has no draft head. Load it with "
                "LanternPipeline.from_pretrained(..., draft_head=head), or pass lantern_config=None to decode plainly."
            )
        if not isinstance(value, str):
            return LanternConfig.resolve(value)
        if value != "default":
            raise ValueError(f"`lantern_config` must be a LanternConfig, a dict, None or 'default', got {value!r}.")
        own = self.config.lantern_config
        return LanternConfig.resolve(self.draft_head.config.lantern_config if own is None else own)

    def _generate(
        self, arguments: dict[str, Any], config: LanternConfig | None, generator: Any, progress: DecodingProgress
    ) -> LanternGenerateOutput:
        """Decode the codes of all images."""
        wake(self._target)  # its parts are read and called below, to which a hook of the whole would not listen
        decoding = {
            "custom_generate": lantern_generate,
            "assistant": None if config is None else self.draft_head,
            "lantern_config": config,
            "neighbors": self._neighbors(config),
            "generator": generator,
            "on_round": progress,
            "target_options": self._options,
            "return_dict_in_generate": True,
        }
        return run_generate(self._target, (), arguments | decoding)

    def _neighbors(self, config: LanternConfig | None) -> NeighborTable | None:
        """The head's neighbour table, made from the codebook where the head has none that serves."""
        if config is None or config.is_strict:
            return None
        assert self.draft_head is not None
        adapter, table = self._adapter, self.draft_head.neighbors
        codebook = self._codebook(adapter)
        if codebook is None:
            return table
        if table is not None and not codebook.is_meta:  # weights offloaded by other means cannot be compared
            table.check(codebook)
        if config.neighborhood_size >= len(codebook):
            raise ValueError(
                f"`neighborhood_size` must be below {len(codebook)}, the codes of this model, got "
                f"{config.neighborhood_size}. Try 10."
            )
        if table is None or table.k < config.neighborhood_size:
            table = cached_neighbors(codebook.float(), config.neighborhood_size, adapter.codebook_metric)
            self.draft_head.neighbors = table
        return table

    def _codebook(self, adapter: TargetAdapter) -> Tensor | None:
        """The codebook of the target, or that of the VQ model beside it."""
        own = adapter.codebook()
        if own is not None or self.vq_model is None:
            return own
        quantizer: Any = self.vq_model.quantize
        return read_weight(quantizer.embedding)
