"""The case table with the kernels, tiles and plans of other cards, on the card of this machine.

Each profile is a process of its own: `FLASHPAGE_CARD="RTX 4090" python tests/support/harness.py --device cuda`. Most of
its time goes to compiling some hundred kernels, which cards with equal shared memory share. `card_check.py --profiles`
runs this file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from profiles import PROFILES
from programs import run

from flashpage.errors import SettingError
from flashpage.kernels import devices

pytestmark = [pytest.mark.cuda, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PROFILES)
def test_the_case_table(name: str) -> None:
    own = devices.of_index(torch.cuda.current_device())
    try:
        card = devices.as_card(name, own)
    except SettingError as error:
        pytest.skip(str(error))
    if card == own:
        pytest.skip("test_cases.py runs the table with the card's own tiles")
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"FLASHPAGE_CARD": name, "PYTHONPATH": paths}
    done = run([ROOT / "tests" / "support" / "harness.py", "--device", "cuda"], env=environment)
    failed = "\n".join(line for line in done.stdout.splitlines() if "  FAIL  " in line)
    assert done.returncode == 0, f"{failed}\n{done.stderr[-2000:]}"
    assert "cases pass on cuda; failed: []" in done.stdout
