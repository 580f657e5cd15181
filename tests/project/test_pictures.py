"""The pictures of docs/assets are what docs/pictures.py and docs/gallery.py draw, and every page about a hard part has
one."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
_spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
assert _spec is not None and _spec.loader is not None
pictures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pictures)
sys.modules["pictures"] = pictures  # which docs/gallery.py imports
_spec = importlib.util.spec_from_file_location("gallery", DOCS / "gallery.py")
assert _spec is not None and _spec.loader is not None
gallery = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gallery)
DRAWN = [*pictures.PICTURES, *(figure.draw for figure in gallery.drawn_figures())]


@pytest.mark.parametrize("picture", DRAWN, ids=lambda picture: picture.__name__)
def test_the_file_is_what_is_drawn(picture) -> None:
    drawn = picture().svg()
    program = "gallery" if picture.__name__.startswith("gallery") else "pictures"
    assert (DOCS / "assets" / f"{picture.__name__}.svg").read_text() == drawn, f"run `python docs/{program}.py`"
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


def test_the_gallerys_page_is_what_is_written() -> None:
    assert (DOCS / "gallery.md").read_text() == gallery.page(), "run `python docs/gallery.py`"


def test_a_recorded_timeline_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of two runs, without the CTAs after the 24th."""
    monkeypatch.setattr(gallery, "RESULTS", tmp_path)
    events = [
        {"ph": "X", "name": name, "pid": 10 * run + process, "tid": tid, "ts": ts, "dur": 5.0}
        for run, ts in ((0, 100.0), (1, 2.0))
        for tid in (1, 24, 25)
        for process, name in ((1, "compute"), (2, "request 7"))
    ]
    for name in ("decode", "prefill"):
        (tmp_path / f"timeline-{name}.json").write_text(json.dumps({"traceEvents": [{"ph": "M", "pid": 1}, *events]}))
    assert len(gallery.drawn_figures()) == len(gallery.FIGURES) == 8
    for draw in (gallery.gallery_decode_ring, gallery.gallery_prefill_ring):
        drawn = draw().svg()
        assert "of a run of 7.0 us" in drawn
        assert drawn.count('class="box c"') == 3 + 2, "two bars and the legend, and two pieces of request 7"
