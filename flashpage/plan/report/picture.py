"""Pictures of a plan: CTAs as rows, time to the right, work items coloured by request."""

from __future__ import annotations

import colorsys
import os
import sys
from typing import NamedTuple

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PALETTE = (
    33,
    208,
    40,
    199,
    226,
    51,
    129,
    118,
    203,
    27,
    214,
    48,
    171,
    190,
    39,
    160,
    82,
    219,
    100,
    75,
    202,
    35,
    93,
    184,
)


class Segment(NamedTuple):
    """One work item of one CTA."""

    cta: int
    request: int
    start: float  # ns, since the CTA began
    end: float
    is_piece: bool  # part of a unit whose KV range was cut


def terminal(segments: list[Segment], num_ctas: int, width: int, max_rows: int, color: bool | None) -> str:
    """A text drawing of at most `max_rows` rows; if CTAs share a row, it shows the costliest of them."""
    if color is None:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    rows: dict[int, list[Segment]] = {}
    for segment in sorted(segments, key=lambda segment: segment.cta):
        rows.setdefault(segment.cta, []).append(segment)
    busy = list(rows)
    longest = max((row[-1].end for row in rows.values()), default=0.0)
    together = -(-len(busy) // max_rows) or 1
    label_width = len(str(num_ctas - 1))
    cells = max(8, width - label_width - 2)
    scale = cells / longest if longest else 0.0
    lines = []
    for first in range(0, len(busy), together):
        drawn = max(busy[first : first + together], key=lambda cta: rows[cta][-1].end)
        lines.append(f"{drawn:>{label_width}} |{_bar(rows[drawn], scale, color)}")
    count = f"{num_ctas} CTAs" if len(busy) == num_ctas else f"{len(busy)} of {num_ctas} CTAs (the others have no work)"
    shared = f", the costliest of every {together}" if together > 1 else ""
    lines.append(
        f"{count} as rows{shared}; time to the right, {longest / 1e3:.3g} us for the longest; {_legend(color)}"
    )
    return "\n".join(lines)


def _legend(color: bool) -> str:
    if color:
        return "colours are requests, shaded where a unit is cut into pieces"
    return "letters are requests, capitals where a unit is cut into pieces"


def _bar(row: list[Segment], scale: float, color: bool) -> str:
    """Draws one row; each cell shows the work item at the cell's middle."""
    out, at = [], 0
    for segment in row:
        end = int(segment.end * scale + 0.5)
        count, at = max(0, end - at), max(at, end)
        if not count:
            continue
        if color:
            tone = _PALETTE[segment.request % len(_PALETTE)]
            out.append(f"\x1b[38;5;{tone}m{('▒' if segment.is_piece else '█') * count}\x1b[0m")
        else:
            letter = _LETTERS[segment.request % len(_LETTERS)]
            out.append((letter.upper() if segment.is_piece else letter) * count)
    return "".join(out)


def svg(segments: list[Segment], num_ctas: int, title: str) -> str:
    """An SVG drawing, 1000 wide. Hovering over an item shows its request and time."""
    height, left = max(3, min(14, 1400 // num_ctas)), 46
    longest = max((segment.end for segment in segments), default=0.0)
    scale = (1000 - left - 4) / longest if longest else 0.0
    total = num_ctas * height
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {total + 44}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="1000" height="{total + 44}" fill="white"/><text x="{left}" y="14">{title}</text>',
    ]
    for cta in range(0, num_ctas, max(1, -(-14 // height))):
        lines.append(f'<text x="{left - 6}" y="{22 + cta * height + 9}" text-anchor="end" fill="#777">{cta}</text>')
    for s in segments:
        x, w = left + s.start * scale, (s.end - s.start) * scale
        name = f"CTA {s.cta}, request {s.request}{', piece of a cut unit' if s.is_piece else ''}"
        lines.append(
            f'<rect x="{x:.2f}" y="{22 + s.cta * height}" width="{w:.2f}" height="{height}" fill="{tone(s.request)}" '
            f'fill-opacity="{0.6 if s.is_piece else 1}" stroke="white" stroke-width="0.4">'
            f"<title>{name}: {(s.end - s.start) / 1e3:.2f} us</title></rect>"
        )
    lines.append(f'<text x="{left}" y="{total + 38}" fill="#777">0</text>')
    lines.append(f'<text x="996" y="{total + 38}" text-anchor="end" fill="#777">{longest / 1e3:.4g} us</text></svg>')
    return "\n".join(lines)


def tone(request: int) -> str:
    """A request's colour; neighbouring requests are far apart on the colour circle (golden ratio)."""
    red, green, blue = colorsys.hls_to_rgb(request * 0.6180339887 % 1.0, 0.45 + 0.15 * (request % 3) / 2, 0.7)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"
