"""The page of a plan: its numbers, and the page itself in a headless browser, with clicks, keys and searches."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashpage.cli import main
from flashpage.plan import plan_lengths
from flashpage.plan.report.page import Fact, page
from flashpage.plan.report.units import CTA_WORK_ITEM

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REQUESTS = 12
# Uses the page as a person does, and notes what the page shows after each step.
VISIT = """<script>
const notes = {};
function fire(what, type, given) {
  const kinds = { keydown: KeyboardEvent, wheel: WheelEvent };
  what.dispatchEvent(new (kinds[type] || PointerEvent)(type, { bubbles: true, cancelable: true, ...given }));
}
addEventListener("error", e => notes.error = e.message);
addEventListener("load", () => {
  const canvas = $("lanes"), box = canvas.getBoundingClientRect(), tip = $("tip"), chosen = $("chosen");
  const place = { clientX: box.left + 80, clientY: box.top + 3 }, found = $("found"), search = $("search");
  const colours = canvas.getContext("2d").getImageData(left, 0, 400, canvas.height).data.buffer;
  notes.colours = new Set(new Uint32Array(colours)).size;
  notes.fits = document.documentElement.scrollWidth <= innerWidth;
  fire(canvas, "pointermove", place); notes.hover = tip.textContent; notes.shown = tip.style.display;
  fire(canvas, "pointerdown", place); fire(canvas, "pointerup", place); notes.click = chosen.textContent;
  fire(canvas, "keydown", { key: "ArrowRight" }); notes.right = chosen.textContent;
  fire(canvas, "keydown", { key: "ArrowDown" }); notes.down = chosen.textContent;
  fire(canvas, "pointerleave", {}); notes.hidden = tip.style.display;
  search.value = "3"; fire(search, "keydown", { key: "Enter" });
  notes.found = found.textContent; notes.first = chosen.textContent;
  search.value = "99999"; fire(search, "keydown", { key: "Enter" }); notes.lost = found.textContent;
  fire(document.body, "keydown", { key: "Escape" }); notes.cleared = found.textContent + search.value;
  const span = () => (view.to - view.from) / plan.longest;
  $("in").click(); notes.zoom = [span()];
  fire(canvas, "wheel", { ctrlKey: true, deltaY: -100, ...place }); notes.zoom.push(span());
  fire(document.body, "keydown", { key: "0" }); notes.zoom.push(span());
  document.querySelector("#requests button").click(); notes.table = found.textContent;
  const begin = performance.now();
  for (let i = 0; i < 5; ++i) { zoom(0.7); draw(); }
  notes.milliseconds = (performance.now() - begin) / 5;
  $("data").remove();
  document.body.append("NOTES" + JSON.stringify(notes) + "END");
});
</script>"""


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def column(data: Any, name: str) -> np.ndarray:
    kind, text = data["columns"][name]
    return np.frombuffer(base64.b64decode(text), "<" + kind)


def visit(path: Path, text: str, width: int) -> Any:
    """Opens the page with the visit's script, and returns its notes."""
    assert BROWSER is not None
    path.write_text(text.replace("</html>", VISIT + "</html>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    options += [f"--user-data-dir={path.parent}/user", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run([BROWSER, *options, path.as_uri()], capture_output=True, text=True, timeout=120)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r"NOTES(\{.*\})END", done.stdout)
    assert found is not None, done.stdout[-500:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_the_page_has_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"zipf:{REQUESTS}:2048", "--card", "H200", "--html", str(tmp_path / "plan.html")]) == 0
    assert "page: " in capsys.readouterr().out
    text = (tmp_path / "plan.html").read_text()
    assert not re.search(r"https?://|\{\{", text), "the page needs nothing else"
    plan = plan_lengths(None, [2048 * REQUESTS // 4] * 3 + [700] * 5, 32, 8, 128)
    plan.to_html(tmp_path / "other.html")
    data, items = data_of((tmp_path / "other.html").read_text()), plan.work_items()
    for name in ("request", "kv_head", "num_units", "first_packed_row", "kv_begin", "kv_end"):
        assert np.array_equal(column(data, name), items[name]), name
    first, ends = column(data, "first"), column(data, "end")
    assert np.array_equal(np.diff(first), np.bincount(items["cta"], minlength=132))
    busy = np.diff(first) > 0
    np.testing.assert_allclose(ends[first[1:][busy] - 1], plan.cta_loads()[busy], rtol=1e-6)
    assert len(data["table"]) == 8 and sum(row[3] for row in data["table"]) == len(items)
    assert plan._repr_html_().startswith("<iframe srcdoc=")


@pytest.mark.skipif(BROWSER is None, reason="no browser here: apt-get install chromium")
def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    """170 CTAs of many pieces on a narrow screen, and every way to use the page."""
    ctas, pieces = 170, 1000
    items = np.zeros(ctas * pieces, CTA_WORK_ITEM)
    items["cta"], items["request"] = np.repeat(np.arange(ctas), pieces), np.arange(len(items)) // 7 % 5000
    items["kv_end"], items["q_len"], items["kv_len"], items["num_units"] = 64, 1, 4096, 1
    items["partial_row"] = np.where(items["request"] % 2, 5, -1)
    costs = np.random.default_rng(0).uniform(500, 3000, len(items))
    text = page("a <plan>", items, costs, ctas, 4, [Fact("1 us", "a fact")], "reasons & more")
    notes = visit(tmp_path / "page.html", text, 500)
    assert notes["fits"] and notes["colours"] > 100 and "error" not in notes
    assert notes["milliseconds"] < 400, "a headless browser without a GPU, on a busy machine"
    assert re.match(r"CTA 0, step \d+ of 1000: request \d+ of 4096 tokens and 1 row\nKV head 0 \(query", notes["hover"])
    assert notes["shown"] == "block" and notes["hidden"] == "none"
    assert notes["click"] == notes["hover"]
    step = int(re.findall(r"step (\d+)", notes["click"])[0])
    assert f"CTA 0, step {step + 1} of" in notes["right"] and notes["down"].startswith("CTA 1, step ")
    assert notes["found"].startswith("request 3: ") and "request 3 of 4096 tokens" in notes["first"]
    assert notes["lost"] == "request 99999 has no work here"
    assert notes["cleared"] == "" and notes["table"].startswith("request ")
    zoomed, wheeled, whole = notes["zoom"]
    assert wheeled < zoomed < whole == 1.0
