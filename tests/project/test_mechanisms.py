"""The table of mechanisms names existing files, names and tests, and has a row for every mechanism."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "mechanisms.md").read_text().splitlines()
    if re.match(r"\| [ABC]\d+ \|", line)
]


def test_every_mechanism_has_a_row() -> None:
    expected = [f"{part}{i}" for part, count in (("A", 28), ("B", 30), ("C", 20)) for i in range(1, count + 1)]
    assert [row[0] for row in ROWS] == expected


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_a_row_names_is_there(row: list[str]) -> None:
    _, mechanism, counterpart, shown = row
    assert mechanism and counterpart
    for place in re.findall(r"`((?:flashpage|include|csrc|templates)/[^`]+)`", counterpart):
        path, _, name = place.partition(":")
        text = (ROOT / path).read_text()
        assert not name or re.search(
            rf"(?:def|class|struct|void)(?: alignas\(\d+\))? {name}\b|^\s*{name}\b.*=", text, re.MULTILINE
        ), place
    tests = re.findall(r"`(tests/[^`]+)`", shown)
    assert tests, "the row names no test"
    for test in tests:
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test
    assert not re.sub(r"`tests/[^`]+`", "", shown).strip()
