"""The metadata by which an engine finds the plugin of this checkout, as of an installed package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write_entry_points(folder: Path, group: str, *others: str) -> Path:
    """Writes pyproject.toml's entry points of a group, and the text of other groups; returns the folder, for
    PYTHONPATH."""
    title = f'[project.entry-points."{group}"]\n'
    line = (ROOT / "pyproject.toml").read_text().partition(title)[2].splitlines()[0]
    found = folder / "flashpage_here-0.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: flashpage-here\nVersion: 0\n")
    lines = f"[{group}]", line.replace('"', ""), *others, ""
    (found / "entry_points.txt").write_text("\n".join(lines))
    return folder
