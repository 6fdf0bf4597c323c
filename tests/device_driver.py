"""Generates with models spread over two pretend accelerators and with the same models on the CPU; not a test itself.

python tests/device_driver.py FOLDER

Prints one line of JSON for each case: the devices of the prompt, the result and the head, and the tokens both ways.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from conftest import tiny_head
from family_matrix import FAMILIES, Family
from helpers import CASES, make_case
from pretend_devices import FIRST, LAST, set_up, spread
from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf import LanternConfig, NeighborTable, lantern_generate
from lantern_hf.resolve import head_for

NEW_TOKENS = 6
STRICT_ONLY = ("llama", "chameleon-text")
STRICT = {"do_sample": True, "top_k": 12, "repetition_penalty": 1.2, "lantern_config": LanternConfig.strict()}
RELAXED = {"do_sample": True, "lantern_config": LanternConfig(lam=3.0, neighborhood_size=5)}


def plain_cases() -> list[Family]:
    """The targets without an image structure, as rows of the families' matrix."""
    return [
        Family(
            name,
            lambda attention, name=name: make_case(name, attention=attention).model,
            lambda model, rows, guided, name=name: make_case(name, rows, 2.0 if guided else None).inputs,
            None,  # type: ignore[arg-type]  nothing is compared with the family's own decoding here
            None,  # type: ignore[arg-type]
            NEW_TOKENS,
        )
        for name in CASES
    ]


def refuses_to_mix() -> bool:
    """Whether an operator refuses tensors of two devices."""
    try:
        torch.ones(2, device=FIRST) + torch.ones(2, device=LAST)
    except RuntimeError as error:
        return "aten.add.Tensor" in str(error)
    return False


def generate(family: Family, model: PreTrainedModel, head: str, guided: bool, relaxed: bool, device: str) -> Tensor:
    """Two rows whose prompts are on a device."""
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in family.inputs(model, 2, guided).items()}
    if relaxed:
        codebook = torch.randn(family.num_codes, 4, generator=torch.Generator().manual_seed(3))
        inputs["neighbors"] = NeighborTable.from_codebook(codebook, 8)
    return model.generate(
        **inputs,
        **(RELAXED if relaxed else STRICT),
        custom_generate=lantern_generate,
        assistant=head,
        target_options=family.options,
        max_new_tokens=NEW_TOKENS,
        generator=[torch.Generator().manual_seed(row) for row in range(2)],
    )


def compare(family: Family, guided: bool, relaxed: bool, inputs_on: str, folder: Path) -> dict[str, Any]:
    """Generate on the CPU and with the model spread."""
    model = family.make("sdpa")
    head = str(folder / family.name)
    tiny_head(model).save_pretrained(head)
    expected = generate(family, model, head, guided, relaxed, "cpu")
    tokens = generate(family, spread(model), head, guided, relaxed, inputs_on)
    return {
        "case": f"{family.name} {'guided' if guided else 'unguided'}",
        "inputs": inputs_on,
        "result": str(tokens.device),
        "head": str(head_for(head, model).device),
        "tokens": tokens.tolist(),
        "expected": expected.tolist(),
    }


def main(folder: Path) -> None:
    set_up()
    report({"case": "mixed", "refused": refuses_to_mix()})
    for family in plain_cases():
        report(compare(family, False, False, "cpu", folder))
        report(compare(family, True, family.name not in STRICT_ONLY, FIRST, folder))
    for family in FAMILIES:
        report(compare(family, True, True, "cpu", folder))


def report(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
