"""Saving, pushing and downloading of a pipeline, by the rules that hold for heads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import CommitInfo

from lantern_hf._files import staged_files
from lantern_hf._hub_card import CardDetails, card_text, is_hub_id, merge_card
from lantern_hf._hub_push import push_to_hub
from lantern_hf._hub_upload import Push
from lantern_hf._pipeline_arguments import write_family
from lantern_hf._pipeline_target import PipelineTargetMixin
from lantern_hf.head_publishing import check_weight_values
from lantern_hf.hub import download_pipeline

__all__ = ["PipelineHubMixin"]


class PipelineHubMixin(PipelineTargetMixin):
    """What `LanternPipeline` has on top of `DiffusionPipeline` for files and the Hub."""

    _push_message = "Upload pipeline"
    push_to_hub = push_to_hub  # type: ignore[assignment]  # with a card, which the library's own lacks

    def register_to_config(self, **kwargs: Any) -> None:
        """Note settings and the classes of components, as `DiffusionPipeline` does.

        diffusers takes a transformers class for one of its own pipelines' where a folder there has the name of the
        model's, as `glm_image`; written down so, no other program would find it.

        Args:
            **kwargs: Settings, and `(library, class)` of components.
        """
        super().register_to_config(**{name: _findable(value) for name, value in kwargs.items()})

    @classmethod
    def download(cls, pretrained_model_name: str, **kwargs: Any) -> str:
        """Download a pipeline into the cache; `from_pretrained` calls this for a Hub id.

        diffusers' own refuses components of another library, and would leave out the neighbour table.

        Args:
            pretrained_model_name: Hub id.
            **kwargs: As in diffusers; components that are passed are not downloaded.

        Returns:
            The folder.

        Raises:
            FileNotFoundError: There is no such repository or revision, or it holds no pipeline.
            OSError: The Hub cannot be reached, or a download is corrupt.
            ValueError: The pipeline's files are not what they should be.
        """
        parts = cls._get_signature_keys(cls)[0] - kwargs.keys()
        return download_pipeline(pretrained_model_name, parts, cls.config_name, **kwargs)

    def save_pretrained(  # type: ignore[override]  # the rest of its arguments are in **kwargs
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save as `DiffusionPipeline.save_pretrained` does; a kill leaves each file old or new, never broken.

        Args:
            save_directory: Folder to write.
            safe_serialization: Must be True; weights are saved as safetensors alone.
            push_to_hub: Push the pipeline afterwards, to `repo_id` or a repository named like the folder.
            **kwargs: As in diffusers.

        Raises:
            ValueError: `safe_serialization=False`.
        """
        if not safe_serialization:
            raise ValueError("`safe_serialization=False` would write pickles, which can run code. Leave it out.")
        names = ("repo_id", "commit_message", "private", "create_pr", "token", "revision")
        upload = {name: kwargs.pop(name) for name in names if name in kwargs}
        with staged_files(Path(save_directory), self.config_name) as staging:
            super().save_pretrained(os.fspath(staging), **kwargs)
            write_family(staging / "transformer", self._adapter.family)
        if push_to_hub:
            self.push_to_hub(upload.pop("repo_id", Path(save_directory).name), **upload)

    def _push(self, folder: Path, push: Push, card: CardDetails) -> CommitInfo:
        """Send the pipeline that was saved in a folder."""
        files: dict[str, Path | bytes] = {
            file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()
        }
        check_weight_values([file for file in folder.rglob("*.safetensors") if file.stem != "neighbors"])
        if card.image is not None and card.image_name is not None:
            files[card.image_name] = Path(card.image)
        return push.send(
            files,
            lambda name, existing: merge_card(existing, *self._card(name, card)),
            stale=["draft_head/neighbors.safetensors"],
        )

    def _card(self, repo_id: str, details: CardDetails) -> tuple[dict[str, Any], str]:
        """Metadata and text of the card."""
        target: Any = self._adapter.model
        by_class, grid = self._adapter.asks == "class_labels", self._adapter.grid
        draw = "pipe(class_labels=1)" if by_class else 'pipe("a red fox")'
        parts = {name: part for name, part in self.components.items() if hasattr(part, "num_parameters")}
        facts = {name: f"{part.num_parameters() / 1e6:.2f} M parameters" for name, part in parts.items()}
        size = "codes" if grid is None else f"{grid[0]} x {grid[1]} codes"
        facts["image"] = f"{size} of {self._adapter.codebook_size}"
        own: Any = self.config
        facts["draws"] = f"{'classes' if by_class else 'text'}, guidance {own.guidance_scale:g} by default"
        base = details.base_model or target.config._name_or_path
        return card_text(
            repo_id,
            details,
            base_model=base if is_hub_id(base) else None,
            pipeline_tag="unconditional-image-generation" if by_class else "text-to-image",
            summary=(
                f"A {type(target).__name__} that draws images"
                f"{', with a LANTERN draft head: several tokens from each pass' if parts.get('draft_head') else ''}. "
                "Needs `pip install lantern_hf`."
            ),
            usage=(
                "```python\nfrom lantern_hf import LanternPipeline\n\n"
                f'pipe = LanternPipeline.from_pretrained("{repo_id}")\n{draw}.images[0].save("image.png")\n```'
            ),
            facts=facts,
        )


def _findable(value: Any) -> Any:
    """Give `("transformers", class)` for a class of transformers that was taken for one of a diffusers pipeline's."""
    if not (isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(part, str) for part in value)):
        return value
    library, name = value
    if "." in library or library in ("diffusers", "transformers") or not hasattr(transformers, name):
        return value
    return ("transformers", name)
