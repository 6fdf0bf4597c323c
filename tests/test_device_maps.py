"""A target spread over two accelerators by accelerate's own `dispatch_model`, its draft head beside the last layer.

There are none here: the two are CPU memory that refuses operators across devices, see `pretend_devices.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from family_matrix import FAMILIES
from helpers import CASES

DRIVER = Path(__file__).with_name("device_driver.py")
NAMES = [f"{name} {how}" for name in CASES for how in ("unguided", "guided")] + [f"{f.name} guided" for f in FAMILIES]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the driver saw, by case; the backend it takes in cannot be let go of, so it has a process of its own."""
    command = [sys.executable, str(DRIVER), str(tmp_path_factory.mktemp("heads"))]
    paths = os.pathsep.join([str(DRIVER.parents[1]), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_the_devices_refuse_to_mix(lines: dict[str, dict[str, Any]]) -> None:
    assert lines["mixed"]["refused"]
    assert sorted(lines) == sorted(["mixed", *NAMES])


@pytest.mark.parametrize("name", NAMES)
def test_two_devices_decode_as_one(name: str, lines: dict[str, dict[str, Any]]) -> None:
    line = lines[name]
    assert line["tokens"] == line["expected"]
    assert line["result"] == line["inputs"]
    assert line["head"] == "pretend:1"
