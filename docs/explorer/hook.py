"""Hook of `make docs`: writes assets/explorer.js, which docs/plan-explorer.md loads. One file with all that the page
needs, because pages that are read from a folder can load scripts and nothing else."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import build

HERE = Path(__file__).parent
PAGE = build.ROOT / "flashpage" / "plan" / "report" / "plan.html"
MISSING = "These pages were built without em++, so the planner is not in them: apt-get install emscripten, make docs."


def script() -> str:
    """explorer.js, and its start with the planner, the table of schedules and the page of a plan."""
    wasm = build.ROOT / "build" / "explorer" / "planner.wasm"
    wasm.unlink(missing_ok=True)
    if build.compiler():
        build.build(wasm)
    given = {
        "wasm": base64.b64encode(wasm.read_bytes()).decode() if wasm.exists() else "",
        "why": MISSING,
        "table": json.loads((HERE / "table.json").read_text()),
        "page": PAGE.read_text(),
    }
    text = (HERE / "explorer.js").read_text()
    return f"(() => {{\n{text}\nstart({json.dumps(given, separators=(',', ':'))});\n}})();\n"


def on_files(files: Any, config: Any) -> None:
    """Adds the script to the site."""
    files.append(File.generated(config, "assets/explorer.js", content=script()))
