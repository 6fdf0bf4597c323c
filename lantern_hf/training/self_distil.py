"""`self_distil`: have the target generate the sequences its head is trained on.

A head drafts what the target would say, so the target's own samples are the best data, and they need no images.
Sequence i of a run draws from a generator of its own, seeded by the run's seed and i, so what is generated does not
depend on batches, processes or interruptions (up to rounding in batches of another size).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers.utils import logging

from lantern_hf._pipeline_checks import check_sampling
from lantern_hf._placement import wake
from lantern_hf.attach import run_generate
from lantern_hf.config import LanternConfig
from lantern_hf.draft import LanternDraftModel
from lantern_hf.strategy import lantern_generate
from lantern_hf.targets import adapter_for
from lantern_hf.training.conditioning import SIDES, Conditioner
from lantern_hf.training.data import collate
from lantern_hf.training.features import frozen
from lantern_hf.training.fingerprint import target_fingerprint
from lantern_hf.training.runtime import input_device, seed_of
from lantern_hf.training.storage import ShardStore, writing

__all__ = ["DistilConfig", "self_distil"]

logger = logging.get_logger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True)
class DistilConfig:
    """Settings of a run of `self_distil`.

    Attributes:
        sequences_per_prompt: Sequences of each prompt.
        guidance_scale: Classifier-free guidance, at least 1, which is off. Generate as the target will be used.
        top_k: Tokens to draw from; 0 is all.
        top_p: Smallest probability mass to draw from, in (0, 1].
        temperature: Softmax temperature, above 0.
        max_new_tokens: Tokens of a sequence; None is one image.
        seed: Decides every draw.
        batch_size: Sequences generated together; may differ when a run goes on.
        shard_size: Sequences of a shard, which is what a kill can lose.
        tree: Draft tree, when a head is given.

    Raises:
        ValueError: A setting is out of range.
    """

    sequences_per_prompt: int = 1
    guidance_scale: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    temperature: float = 1.0
    max_new_tokens: int | None = None
    seed: int = 0
    batch_size: int = 8
    shard_size: int = 64
    tree: str = "eagle_25"

    def __post_init__(self) -> None:
        check_sampling(self.guidance_scale, self.top_k, self.top_p, self.temperature)
        for name in ("sequences_per_prompt", "batch_size", "shard_size", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
        LanternConfig.strict(self.tree)  # refuses unknown names

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)


def self_distil(
    conditioner: Conditioner,
    prompts: Sequence[Mapping[str, Any]],
    output_dir: str | os.PathLike[str],
    config: DistilConfig,
    *,
    assistant: LanternDraftModel | None = None,
) -> list[Path]:
    """Generate training sequences, or go on where an earlier run of the same settings stopped.

    Under `accelerate launch` or `torchrun` the processes share the shards: process r makes every n-th one from r on.

    Args:
        conditioner: Speaks for the target.
        prompts: What to ask for: rows with `"prompt"` or `"class_label"`, and with a size of their own where they have
            one (`"height"`, `"width"`).
        output_dir: Gets `shard-00000.jsonl`, `shard-00001.jsonl`..., a checksum beside each, and `manifest.json` with
            settings and hashes. `read_rows` and `lantern-hf train --data` read it.
        config: Settings.
        assistant: Head to decode faster with. Acceptance is strict, so that the sequences are still the target's own.

    Returns:
        All shards, those of other processes included.

    Raises:
        ValueError: The folder holds sequences of other settings, the target needs `max_new_tokens`, or its family does
            not have the conditioner's size or the guidance.
        OSError: The disk is full. Shards written before stay good.
    """
    run = _Run(conditioner, prompts, output_dir, config, assistant)
    run.begin()
    with frozen(conditioner.target):
        run.make_missing()
    return run.finish()


class _Run:
    """State of one run; arguments as `self_distil`."""

    def __init__(
        self,
        conditioner: Conditioner,
        prompts: Sequence[Mapping[str, Any]],
        output_dir: str | os.PathLike[str],
        config: DistilConfig,
        assistant: LanternDraftModel | None,
    ):
        self.conditioner, self.prompts, self.config, self.assistant = conditioner, prompts, config, assistant
        length = config.max_new_tokens or conditioner.num_tokens
        if length is None:
            raise ValueError(
                f"{type(conditioner.target).__name__} has no fixed number of tokens. Set `max_new_tokens`."
            )
        if not len(prompts):
            raise ValueError("`prompts` is empty. Give at least one.")
        conditioner.check(config.guidance_scale)
        self.returns_prompt = adapter_for(conditioner.target, **conditioner.target_options).returns_prompt
        self.length, self.state = length, PartialState()
        self.count = len(prompts) * config.sequences_per_prompt
        settings = {name: value for name, value in config.to_dict().items() if name != "batch_size"}
        manifest = {"version": FORMAT_VERSION, "settings": settings, "sequences": self.count}
        manifest |= {"target": target_fingerprint(conditioner.target), "prompts": _prompts_hash(prompts)}
        manifest |= {"max_new_tokens": length, "drafted": assistant is not None}
        if conditioner.size != (None, None):
            manifest["size"] = list(conditioner.size)
        self.store = ShardStore(output_dir, ".jsonl", manifest)
        self.num_shards = -(-self.count // config.shard_size)

    def begin(self) -> None:
        """Refuse a folder of another run, and make ours."""
        if self.state.is_main_process:
            if changed := self.store.differences():
                raise ValueError(
                    f"{self.store.folder} holds sequences of other settings: {'; '.join(changed)}. Use another "
                    "`output_dir`, or remove that one to start anew."
                )
            with writing(f"{self.store.folder}", "Make room, or choose another place."):
                self.store.begin()
        self.state.wait_for_everyone()

    def make_missing(self) -> None:
        """Generate the shards of this process that are not there or damaged."""
        mine = range(self.state.process_index, self.num_shards, self.state.num_processes)
        done = [index for index in mine if self.store.is_whole(index)]
        main, sizes = self.state.is_main_process, {index: len(self._sequences(index)) for index in mine}
        total, initial = sum(sizes.values()), sum(sizes[index] for index in done)
        with logging.tqdm(total=total, initial=initial, desc="Generating", disable=not main or None) as bar:
            for index in mine:
                if self.store.is_whole(index):
                    continue
                if self.store.is_damaged(index):
                    logger.warning(f"{self.store.path(index)} is damaged (its checksum differs) and is made anew.")
                text = "".join(json.dumps(row) + "\n" for row in self._rows(index, bar))
                hint = "The shards before it are good; make room, and run again to go on."
                with writing(f"{self.store.path(index)}", hint):
                    self.store.write(index, partial(Path.write_text, data=text, encoding="utf-8"))

    def _sequences(self, shard: int) -> range:
        """Numbers of the sequences of a shard."""
        first = shard * self.config.shard_size
        return range(first, min(first + self.config.shard_size, self.count))

    def _rows(self, shard: int, bar: Any) -> list[dict[str, Any]]:
        """Generate one shard."""
        rows: list[dict[str, Any]] = []
        numbers = self._sequences(shard)
        size = {side: value for side, value in zip(SIDES, self.conditioner.size, strict=True) if value is not None}
        for first in range(numbers.start, numbers.stop, self.config.batch_size):
            batch = range(first, min(first + self.config.batch_size, numbers.stop))
            asked = [size | dict(self.prompts[number // self.config.sequences_per_prompt]) for number in batch]
            seeds = [seed_of(self.config.seed, number, "sequence") for number in batch]
            rows += [row | {"tokens": tokens} for row, tokens in zip(asked, self._generate(asked, seeds), strict=True)]
            bar.update(len(batch))
        return rows

    def _generate(self, asked: list[dict[str, Any]], seeds: list[int]) -> list[list[int]]:
        """Generate one batch."""
        config, arguments = self.config, self._arguments(asked)
        counts = [config.max_new_tokens or self.conditioner.count(row) or self.length for row in asked]
        decoding = {
            "top_k": config.top_k,
            "top_p": config.top_p,
            "temperature": config.temperature,
            "custom_generate": lantern_generate,
            "assistant": self.assistant,
            "lantern_config": None if self.assistant is None else LanternConfig.strict(config.tree),
            "generator": [torch.Generator().manual_seed(seed) for seed in seeds],
            "do_sample": True,
            "max_new_tokens": max(counts),
            "target_options": self.conditioner.target_options,
        }
        wake(self.conditioner.target)  # whose parts are called, to which a hook of the whole would not listen
        sequences = run_generate(self.conditioner.target, (), arguments | decoding)
        start = arguments["input_ids"].shape[1] if self.returns_prompt else 0
        rows = sequences[:, start:].tolist()
        return [self._cut(row[:count]) for row, count in zip(rows, counts, strict=True)]

    def _arguments(self, asked: list[dict[str, Any]]) -> dict[str, Any]:
        """What a batch is asked by, as a pipeline passes it to `generate`."""
        target, options, scale = self.conditioner.target, self.conditioner.target_options, self.config.guidance_scale
        items = [prompt | {"tokens": torch.zeros(1)} for prompt in self.conditioner.encode_prompts(asked)]
        prompt = collate(items).to(input_device(target)).prompt
        adapter = adapter_for(target, prompt["input_ids"], **options)
        arguments = {
            name: value.to(target.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in adapter.call_of_rows(prompt).items()
        }
        if scale != 1:
            ids, mask = adapter.blank(prompt["input_ids"], prompt["attention_mask"])
            arguments |= {"negative_prompt_ids": ids, "negative_prompt_attention_mask": mask}
        if bool(prompt["attention_mask"].all()):
            del arguments["attention_mask"]
        return arguments | {"guidance_scale": float(scale)}

    def _cut(self, tokens: list[int]) -> list[int]:
        """Tokens of a text up to and with the first that ends it; an image ends by its length."""
        if self.conditioner.num_tokens is not None:
            return tokens
        ends = getattr(self.conditioner.target.generation_config, "eos_token_id", None)
        ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
        stop = next((place for place, token in enumerate(tokens, start=1) if token in ends), len(tokens))
        return tokens[:stop]

    def finish(self) -> list[Path]:
        """Wait for the other processes, and name the shards."""
        self.state.wait_for_everyone()
        return [self.store.path(index) for index in range(self.num_shards)]


def _prompts_hash(prompts: Sequence[Mapping[str, Any]]) -> str:
    """A hash of all prompts."""
    digest = hashlib.blake2b(digest_size=16)
    for row in prompts:
        digest.update((json.dumps(dict(row), sort_keys=True) + "\n").encode())
    return digest.hexdigest()
