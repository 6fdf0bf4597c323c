"""`attach` gives a model's own `generate` the arguments `assistant=` and `lantern_config=`; `detach` takes them away.

The model's class is swapped for a subclass of the same name, so that pipelines, saving and pickling still see what they
know. Nothing else on the model changes: what a head is attached with lives in one object that `detach` removes.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from lantern_hf._wrappers import unwrap
from lantern_hf.candidates import CandidateTree
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftModel
from lantern_hf.neighbors import NeighborTable
from lantern_hf.resolve import check_relaxation, load_head
from lantern_hf.strategy import lantern_generate
from lantern_hf.targets import TargetAdapter, adapter_class, adapter_for
from lantern_hf.tree_support import check_tree_support

__all__ = ["attach", "detach"]

_STATE = "_lantern"


@dataclass
class _Attachment:
    """Defaults of an attached model, and the heads it has loaded by name."""

    assistant: LanternDraftModel | CandidateTree | str | None = None
    lantern_config: LanternConfig | Mapping[str, Any] | None = None
    neighbors: NeighborTable | None = None
    default_on: bool = False
    target_options: Mapping[str, Any] | None = None
    loaded: dict[str, LanternDraftModel] = field(default_factory=dict)

    def head(self, assistant: Any, model: PreTrainedModel) -> Any:
        """The assistant of a call; one given by name is loaded once."""
        assistant = self.assistant if assistant is None else assistant
        if not isinstance(assistant, str):
            return assistant
        if assistant not in self.loaded:
            self.loaded[assistant] = load_head(assistant, model)
        return self.loaded[assistant]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attachment:
        """A copied model loads heads anew, since a head belongs to one target."""
        return _Attachment(self.assistant, self.lantern_config, self.neighbors, self.default_on, self.target_options)


class LanternMixin:
    """What an attached model's `generate` understands on top of its own arguments."""

    def generate(
        self,
        *args: Any,
        assistant: LanternDraftModel | CandidateTree | str | None = None,
        lantern_config: LanternConfig | Mapping[str, Any] | None = None,
        neighbors: NeighborTable | None = None,
        generator: Any = None,
        streamer: Any = None,
        on_round: Any = None,
        target_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate with LANTERN++ if `assistant` or `lantern_config` is given or on by default, else as the model does.

        Args:
            *args: As the model's own `generate`.
            assistant: Draft head, its folder or Hub id, or a `CandidateTree`. Default: the attached one.
            lantern_config: Tree and acceptance rule. Default: the attached one, then the head's.
            neighbors: Neighbour table. Default: the attached one, then the head's.
            generator: A `torch.Generator`, or one per row.
            streamer: As in transformers.
            on_round: As in `lantern_generate`.
            target_options: As in `lantern_generate`. Default: the attached ones.
            **kwargs: As the model's own `generate`.

        Returns:
            As the model's own `generate`; with `return_dict_in_generate` a `LanternGenerateOutput`.

        Raises:
            ValueError: As `lantern_generate`, or `custom_generate` is given as well.
        """
        state: _Attachment = self.__dict__[_STATE]
        stock: Any = super()
        if assistant is None and lantern_config is None and not state.default_on:
            extra = {
                "neighbors": neighbors,
                "generator": generator,
                "on_round": on_round,
                "target_options": target_options,
            }
            if unused := [name for name, value in extra.items() if value is not None]:
                raise ValueError(
                    f"{', '.join(f'`{name}`' for name in unused)} belongs to LANTERN decoding, which this call does "
                    "not ask for. Pass `assistant=` or `lantern_config=`, or attach with default_on=True."
                )
            return stock.generate(*args, streamer=streamer, **kwargs)
        if kwargs.get("custom_generate") is not None:
            raise ValueError("`custom_generate` and LANTERN decoding exclude each other. Leave one of them out.")
        head = state.head(assistant, self)  # type: ignore[arg-type]
        if head is None:
            raise ValueError(
                "`lantern_config` was given, but no draft head is attached. Pass `assistant=`, or attach one: "
                "lantern_hf.attach(model, assistant=head)."
            )
        options = state.target_options if target_options is None else target_options
        kwargs |= {
            "custom_generate": lantern_generate,
            "assistant": head,
            "lantern_config": state.lantern_config if lantern_config is None else lantern_config,
            "neighbors": state.neighbors if neighbors is None else neighbors,
            "generator": generator,
            "lantern_streamer": streamer,
            "on_round": on_round,
            "target_options": options,
        }
        return run_generate(self, args, kwargs)


def run_generate(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a target's `generate` with a decoding loop, in the way that its family needs, attached or not.

    Args:
        model: The target.
        args: Positional arguments of the model's own `generate`.
        kwargs: Its keyword arguments, `custom_generate` and what that takes among them.

    Returns:
        What the loop returns.
    """
    options = kwargs.get("target_options") or {}
    arguments = adapter_class(model, options.get("family")).generate_arguments(model, args, kwargs)
    if arguments is not None:
        return GenerationMixin.generate(model, **arguments)
    # An attached model's `generate` would look for a head of its own.
    kind: Any = type(model).__mro__[2] if isinstance(model, LanternMixin) else type(model)
    return kind.generate(model, *args, **kwargs)


def attachment(model: Any) -> _Attachment | None:
    """Give what a model is attached with, None for one that is not."""
    return unwrap(model).__dict__.get(_STATE)


@cache
def _attached_class(cls: type) -> type:
    """The subclass an attached model gets; same name, so that whoever looks at names sees no difference."""
    return type(
        cls.__name__,
        (LanternMixin, cls),
        {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": _reduce,
        },
    )


def _reduce(model: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle an attached model as its plain class plus the swap, since the dynamic class cannot be found by name."""
    return _rebuild, (type(model).__mro__[2],), model.__dict__


def _rebuild(cls: type) -> Any:
    """Make an empty attached model; pickle fills in its state."""
    return copyreg.__newobj__(_attached_class(cls))  # type: ignore[attr-defined]


def attach(
    model: PreTrainedModel,
    assistant: LanternDraftModel | CandidateTree | str | None = None,
    lantern_config: LanternConfig | Mapping[str, Any] | None = None,
    default_on: bool = False,
    *,
    neighbors: NeighborTable | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Let `model.generate` decode with LANTERN++.

    Args:
        model: Any supported transformers model, already on its devices. It is changed in place, and only in its class.
            Of a model wrapped by PEFT, `torch.compile` or for several processes the inner one is.
        assistant: Default draft head, its folder or Hub id; loaded next to the model's last layer.
        lantern_config: Default settings.
        default_on: Decode every call with LANTERN++, also those that name neither `assistant` nor `lantern_config`. For
            pipelines that call `generate` themselves.
        neighbors: Default neighbour table.
        target_options: Default options of the target's adapter, as in `lantern_generate`.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is no transformers model, nor wraps one.
        ValueError: The model cannot score a tree, the head does not fit, `generate` was replaced on the instance, or
            `default_on` has no head.
    """
    given, model = model, unwrap(model)
    if "generate" in model.__dict__:
        raise ValueError(
            f"`generate` of this {type(model).__name__} was replaced on the instance by another library, which would "
            "hide LANTERN decoding. Attach before that library patches the model, or call "
            "model.generate(custom_generate=lantern_hf.lantern_generate, assistant=head)."
        )
    if default_on and assistant is None:
        raise ValueError("`default_on=True` needs `assistant`. Pass a draft head, its folder or its Hub id.")
    options = dict(target_options or {})
    _check_fit(adapter_for(model, **options), assistant, lantern_config, neighbors)
    check_tree_support(model)
    state = _Attachment(assistant, lantern_config, neighbors, default_on, options)
    if isinstance(assistant, LanternDraftModel):
        assistant.bind(model)
    else:
        state.head(assistant, model)
    if not isinstance(model, LanternMixin):
        model.__class__ = _attached_class(type(model))  # type: ignore[arg-type]
    model.__dict__[_STATE] = state
    return given


def _check_fit(
    adapter: TargetAdapter, assistant: Any, lantern_config: LanternConfig | Mapping[str, Any] | None, neighbors: Any
) -> None:
    """Refuse defaults that no call could use: relaxing a text model, or a table over another codebook."""
    config = LanternConfig.strict() if lantern_config is None else LanternConfig.resolve(lantern_config)
    check_relaxation(config, neighbors, adapter)
    table = neighbors if neighbors is not None else getattr(assistant, "neighbors", None)
    codebook = adapter.codebook()
    if table is not None and codebook is not None and codebook.device.type != "meta":
        table.check(codebook.detach())


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model its own `generate` back; a model that is not attached is returned as it is."""
    inner = unwrap(model)
    if isinstance(inner, LanternMixin):
        inner.__class__ = type(inner).__mro__[2]
        inner.__dict__.pop(_STATE, None)
    return model
