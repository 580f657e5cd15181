"""The pictures of docs/assets are what docs/pictures.py draws, and every page about a hard part has one."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
_spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
assert _spec is not None and _spec.loader is not None
pictures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pictures)


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda picture: picture.__name__)
def test_the_file_is_what_is_drawn(picture) -> None:
    drawn = picture().svg()
    assert (DOCS / "assets" / f"{picture.__name__}.svg").read_text() == drawn, "run `python docs/pictures.py`"
    root = ElementTree.fromstring(drawn)
    width = float(root.attrib["width"])
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(rect.attrib["x"]) >= 0 and float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
    assert "prefers-color-scheme: dark" in drawn


HARD_PARTS = (
    *("planner", "plan_format", "decode_sm90", "prefill_sm90"),
    *("masks", "mixed_batches", "graphs", "jit_and_cache"),
)


@pytest.mark.parametrize("page", HARD_PARTS)
def test_a_page_about_a_hard_part_has_its_picture(page: str) -> None:
    assert re.search(rf"!\[[^\]]+\]\(assets/{page}\.svg\)", (DOCS / f"{page}.md").read_text())
