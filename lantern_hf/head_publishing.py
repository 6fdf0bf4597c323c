"""A published head: the files of a repository, made from the folder that `save_pretrained` wrote.

Besides config, weights and table these are the card and `custom_generate/`, through which transformers runs the head
without `lantern_hf` having been imported. Folders and bytes; no model is made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from safetensors import safe_open

from lantern_hf._hub_card import CardDetails, card_text, is_hub_id, merge_card
from lantern_hf._hub_training import TrainingRecord
from lantern_hf._hub_upload import Push
from lantern_hf._version import __version__
from lantern_hf.config import LanternConfig
from lantern_hf.draft_config import LanternDraftConfig
from lantern_hf.head_files import (
    CONFIG_FILE,
    INDEX_FILE,
    NEIGHBORS_FILE,
    WEIGHTS_FILE,
    check_finite,
    read_config,
    weight_files,
)

__all__ = ["check_weight_values", "head_card", "head_files", "published_config", "push_head"]

_STUB = '''"""Decode with the LANTERN draft head of this repository:

    model.generate(**inputs, custom_generate="{repo_id}", trust_remote_code=True)

It needs `pip install lantern_hf`; the work is done there.
"""

HEAD = "{repo_id}"


def generate(model, *args, assistant=HEAD, **kwargs):
    from lantern_hf.hub import generate_with_head

    return generate_with_head(model, *args, assistant=assistant, **kwargs)
'''
_REQUIREMENTS = "lantern_hf>={version}\n"
_STALE = (NEIGHBORS_FILE, INDEX_FILE, WEIGHTS_FILE)


def push_head(folder: Path, push: Push, card: CardDetails) -> CommitInfo:
    """Publish the head in a folder, in one commit.

    Args:
        folder: What `save_pretrained` wrote; it is only read.
        push: Where to.
        card: What the card says beyond the files.

    Returns:
        The commit.

    Raises:
        PermissionError: No token, or one without the right.
        ValueError: The folder holds no sound head, or the card is not valid.
        OSError: The Hub refuses or cannot be reached.
    """
    config = published_config(folder, card)
    files = head_files(folder)
    if card.image is not None and card.image_name is not None:
        files[card.image_name] = Path(card.image)

    def write_card(name: str, existing: str | None) -> str:
        # only now is the full name known, which the code for `custom_generate=` carries
        files["custom_generate/generate.py"] = _STUB.format(repo_id=name).encode()
        return merge_card(existing, *head_card(name, config, folder, card))

    files[CONFIG_FILE] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    files["custom_generate/requirements.txt"] = _REQUIREMENTS.format(version=__version__).encode()
    return push.send(files, write_card, stale=_STALE)


def head_files(folder: Path) -> dict[str, Path | bytes]:
    """Weights and table of a head, by their names in a repository.

    Raises:
        FileNotFoundError: There are no weights.
        ValueError: Weights are not finite, or lie in another format.
    """
    files: dict[str, Path | bytes] = {}
    weights = weight_files(folder)
    check_weight_values(weights)
    files |= {file.name: file for file in weights}
    for name in (INDEX_FILE, NEIGHBORS_FILE):
        if (folder / name).is_file() and not (name == INDEX_FILE and WEIGHTS_FILE in files):
            files[name] = folder / name
    return files


def check_weight_values(files: Sequence[Path]) -> None:
    """Refuse to publish weights that are not all numbers, tensor by tensor.

    Raises:
        ValueError: One holds NaN or infinity.
    """
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                check_finite(file, {name: weights.get_tensor(name)})


def published_config(folder: Path, card: CardDetails) -> dict[str, Any]:
    """The config to publish: complete, and without names that mean something on one machine only.

    Raises:
        FileNotFoundError: There is no config.
        ValueError: It is no config of a head.
    """
    config = read_config(folder / CONFIG_FILE)
    values = config.to_diff_dict()
    verifier = dict(config.verifier or {"name_or_path": None, "architectures": None})
    name = card.base_model or verifier.get("name_or_path")
    # a folder says where the author keeps things, and nothing to anybody else
    verifier["name_or_path"] = name if is_hub_id(name) else (Path(name).name if name else None)
    default = LanternConfig.strict() if config.codebook_size is None else LanternConfig()
    values["verifier"] = verifier
    values["lantern_config"] = config.lantern_config or default.to_dict()
    values["lantern_version"] = __version__
    return values


def head_card(repo_id: str, config: dict[str, Any], folder: Path, details: CardDetails) -> tuple[dict[str, Any], str]:
    """Metadata and text of a head's card.

    Args:
        repo_id: Hub id it is for.
        config: As `published_config` gives it.
        folder: The head's folder.
        details: What the author says.
    """
    if details.training is None:
        details = replace(details, training=TrainingRecord.of_head(folder, weight_files(folder)))
    verifier = config["verifier"]
    target = verifier.get("name_or_path") or "its target"
    architecture = (verifier.get("architectures") or [None])[0]
    is_image = config.get("codebook_size") is not None
    return card_text(
        repo_id,
        details,
        base_model=target if is_hub_id(target) else None,
        pipeline_tag="text-to-image" if is_image else "text-generation",
        summary=(
            f"A LANTERN draft head for `{_code(target)}`: with it, several tokens come from each pass of that model. "
            "Needs `pip install lantern_hf`."
        ),
        usage=_usage(repo_id, target, architecture, config.get("grid") or [32, 32]),
        facts=_facts(config, folder, architecture),
    )


def _usage(repo_id: str, target: str, architecture: str | None, grid: Sequence[int]) -> str:
    """Five lines that draw, and the way without an import."""
    name = architecture if architecture and architecture.isidentifier() else "AutoModelForCausalLM"
    tokens = grid[0] * grid[1]
    package = "lantern_hf" if name.startswith("LlamaGen") else "transformers"
    return (
        f"```python\nimport lantern_hf\nfrom {package} import {name}\n\n"
        f'model = lantern_hf.attach({name}.from_pretrained("{_code(target)}"))\n'
        f'tokens = model.generate(**inputs, assistant="{repo_id}", do_sample=True, max_new_tokens={tokens})\n```\n\n'
        "Or without importing anything first:\n\n"
        f'```python\nmodel.generate(**inputs, custom_generate="{repo_id}", trust_remote_code=True)\n```'
    )


def _facts(config: dict[str, Any], folder: Path, architecture: str | None) -> dict[str, str]:
    """The table of facts, from config and files."""
    shape = LanternDraftConfig.from_dict(config)
    grid = "" if shape.grid is None else f", grid {shape.grid[0]} x {shape.grid[1]}"
    codes = "no codebook" if shape.codebook_size is None else f"{shape.codebook_size} codes{grid}"
    size = sum(file.stat().st_size for file in weight_files(folder))
    table = "with neighbour table" if (folder / NEIGHBORS_FILE).is_file() else "made from the codebook when needed"
    defaults = LanternConfig.from_dict(shape.lantern_config or {}).to_dict()
    shown = ", ".join(f"{key} {value}" for key, value in defaults.items() if value is not None)
    return {
        "target": f"{config['verifier'].get('name_or_path') or 'not named'} ({architecture or 'class not named'})",
        "target's images": codes,
        "head": f"{shape.num_hidden_layers} decoder layer(s) of width {shape.hidden_size}, {size / 1e6:.1f} MB",
        "neighbours": table,
        "default settings": shown,
        "written by": f"lantern_hf {config['lantern_version']}, format {shape.format_version}",
    }


def _code(text: str) -> str:
    """Text fit for a code span and a string."""
    return "".join(mark for mark in text if mark.isprintable() and mark not in "`\"'\\<>|")[:120]
