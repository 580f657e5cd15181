"""Draws the pictures of docs/assets: `python docs/pictures.py` writes those whose content has changed.

An SVG's colours follow the reader's system, light or dark. Plans and sizes come from the library itself;
tests/project/test_pictures.py holds that the files are what this program draws.
"""

from __future__ import annotations

import ctypes
import html
import itertools
from collections.abc import Callable
from pathlib import Path

from flashpage.native import structs
from flashpage.plan import plan_lengths

FOLDER = Path(__file__).resolve().parent / "assets"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2933; }
.small { font-size: 11.5px; } .title { font-weight: 600; } .muted { fill: #56616b; } .mid { text-anchor: middle; }
.box { stroke: #7b8794; stroke-width: 1; } .line { stroke: #56616b; stroke-width: 1.4; fill: none; }
.dash { stroke-dasharray: 4 4; } .head { fill: #56616b; }
.n { fill: #eef1f4; } .a { fill: #b8e0d8; } .b { fill: #f9d7a8; } .c { fill: #c9d4f7; } .d { fill: #f5c2c7; }
.e { fill: #e3cdf2; } .o { fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb; } .muted { fill: #a9b4bf; } .line { stroke: #a9b4bf; } .head { fill: #a9b4bf; }
  .box { stroke: #8894a0; } .n { fill: #2f3742; } .a { fill: #1f5f55; } .b { fill: #7a5117; } .c { fill: #3a4a8c; }
  .d { fill: #7d323c; } .e { fill: #5b3d73; } .o { fill: none; }
}
"""


class Canvas:
    """Boxes, texts and arrows at pixels; y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """One line whose baseline is at y."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{html.escape(words)}</text>')

    def box(self, x: float, y: float, w: float, h: float, fill: str = "n", *lines: str, radius: int = 3) -> None:
        """A box with lines of text in its middle; the first is larger."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius}" class="box {fill}"/>')
        first = y + h / 2 - 8 * (len(lines) - 1) + 4.5
        for i, line in enumerate(lines):
            self.text(x + w / 2, first + 16 * i, line, "mid" if i == 0 else "mid small muted")

    def arrow(self, *points: tuple[float, float], dashed: bool = False, head: bool = True) -> None:
        """A line through points, with a head at its end."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        end = ' marker-end="url(#head)"' if head else ""
        self.parts.append(f'<path d="{path}" class="line{" dash" if dashed else ""}"{end}/>')

    def svg(self) -> str:
        """The whole file."""
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        head += '<path d="M0 0 L8 4 L0 8 z" class="head"/></marker>'
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        start = [
            opening,
            f"<title>{html.escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{head}</defs>",
        ]
        return "\n".join([*start, *self.parts, "</svg>\n"])


def planner() -> Canvas:
    """A decode batch on the axis of costs, cut into CTAs' shares: a plan of the library's."""
    lengths = [3000, 900, 400, 1700, 200]
    plan = plan_lengths(None, lengths, num_q_heads=4, num_kv_heads=1, num_ctas=6)
    segments, end = plan.segments(), max(s.end for s in plan.segments())
    c = Canvas(760, 360, "Units of five requests in a row, cut into the shares of six CTAs")
    c.text(20, 24, "The axis: all units in a row, as long as they cost", "title")
    total = sum(s.end - s.start for s in segments)
    scale, x, colours = 720 / total, 20.0, "abcde"
    by_request = sorted(segments, key=lambda s: (s.request, s.cta))
    for request, own in itertools.groupby(by_request, key=lambda s: s.request):
        own = list(own)
        width = sum(s.end - s.start for s in own) * scale
        c.box(x, 36, width, 34, colours[request])
        c.text(x, 88, f"{lengths[request]}" + " tokens" * (width > 80), "small")
        for piece in own[:-1]:
            x += (piece.end - piece.start) * scale
            width -= (piece.end - piece.start) * scale
            c.arrow((x, 30), (x, 76), dashed=True, head=False)
        x += width
    c.text(20, 110, "Dashed: cuts. A request that is cut has several pieces, whose results are merged.", "small muted")
    c.text(20, 142, "The plan: every CTA ends at about the same time", "title")
    for cta in range(6):
        y = 152 + 32 * cta
        c.text(20, y + 18, f"CTA {cta}", "small muted")
        for s in (s for s in segments if s.cta == cta):
            c.box(70 + s.start * 640 / end, y, (s.end - s.start) * 640 / end, 24, colours[s.request])
    c.arrow((70, 346), (716, 346))
    c.text(722, 350, "time", "small muted")
    return c


def plan_format() -> Canvas:
    """The bytes of a plan, with the sizes of the structs that C and Python share."""
    size = {name: ctypes.sizeof(getattr(structs, name)) for name in ("PlanHeader", "CtaStart", "WorkItem", "MergeItem")}
    c = Canvas(760, 330, "The bytes of a plan")
    c.text(20, 24, "One stretch of memory, copied once; the CPU and every card read the same bytes", "title")
    rows = (
        ("PlanHeader", f"{size['PlanHeader']} bytes", "n", 110),
        ("CtaStart x CTAs", f"{size['CtaStart']} bytes each", "a", 180),
        ("WorkItem x items", f"{size['WorkItem']} bytes each", "b", 210),
        ("MergeItem x merges", f"{size['MergeItem']} bytes each", "c", 140),
        ("arrivals", "4 bytes each", "d", 80),
    )
    x, middles = 20.0, []
    for name, bytes_, fill, width in rows:
        c.box(x, 60, width, 56, fill, name, bytes_)
        middles.append(x + width / 2)
        x += width
    header, ctas, items, merges, arrivals = middles
    c.arrow((header, 60), (header, 50), (items - 60, 50), (items - 60, 58), dashed=True)
    c.text(header + 20, 45, "items_offset, merges_offset", "small muted")
    c.arrow((ctas - 30, 116), (ctas - 30, 150), (items - 20, 150), (items - 20, 118))
    c.text(ctas - 20, 145, "begin, end: this CTA's items", "small muted")
    c.arrow((items + 40, 116), (items + 40, 150), (merges, 150), (merges, 118))
    c.text(items + 48, 145, "merge", "small muted")
    c.arrow((merges + 20, 116), (merges + 20, 134), (arrivals, 134), (arrivals, 118))
    c.text(20, 186, "A work item", "title")
    fields = (
        ("which rows", "request, q_begin, q_len, first_packed_row, kv_head, num_units"),
        ("which tokens", "kv_len, kv_begin, kv_end, kv_offset (its page list, or its first row)"),
        ("where results go", "partial_row (-1: the output itself), piece, merge"),
        ("which mask", "mask_offset"),
    )
    for i, (name, what) in enumerate(fields):
        c.box(20, 198 + 31 * i, 150, 25, "b", name)
        c.text(184, 215 + 31 * i, what, "small")
    return c


def decode_sm90() -> Canvas:
    """Warps and memory of one CTA."""
    c = Canvas(760, 330, "The decode kernel: loading warps, a ring of slots, computing warps in teams")
    c.text(20, 24, "One CTA on each SM", "title")
    c.box(20, 44, 120, 200, "n", "global memory", "plan", "pages of K and V", "queries")
    for i in range(4):
        c.box(180, 44 + 50 * i, 110, 40, "a", f"loading warp {i}")
        c.arrow((140, 64 + 50 * i), (178, 64 + 50 * i))
    c.text(180, 266, "walk the plan ahead,", "small muted")
    c.text(180, 282, "across the ends of units", "small muted")
    c.text(338, 38, "ring of slots", "small muted")
    for i in range(6):
        c.box(336, 44 + 33 * i, 90, 27, "b" if i != 5 else "c", "K, V tokens" if i != 5 else "unit, Q")
    c.arrow((290, 140), (334, 140))
    for i in range(4):
        c.box(476, 44 + 50 * i, 120, 40, "e" if i % 2 else "d", f"team {i}", "2 warps")
        c.arrow((426, 64 + 50 * i), (474, 64 + 50 * i))
    c.text(476, 266, "scores, softmax, values;", "small muted")
    c.text(476, 282, "a slot is always the same team's", "small muted")
    c.arrow((474, 232), (450, 232), (450, 256), (380, 256), (380, 246), dashed=True)
    c.text(336, 274, "slot is free again", "small muted")
    c.box(640, 44, 100, 76, "n", "combine", "teams' states", "of a unit")
    c.box(640, 160, 100, 84, "n", "output", "or partials that", "are merged")
    for i in range(4):
        c.arrow((596, 64 + 50 * i), (616, 64 + 50 * i), (616, 82), (638, 82), head=i == 0)
    c.arrow((690, 120), (690, 158))
    return c


def prefill_sm90() -> Canvas:
    """The two warpgroups over time."""
    c = Canvas(760, 290, "The prefill kernel: one warpgroup's softmax runs during the other's matmuls")
    c.text(20, 24, "One warpgroup's softmax runs during the other's matmuls", "title")
    rows = ("loading warps", "warpgroup 0", "warpgroup 1", "tensor cores")
    for i, name in enumerate(rows):
        c.text(20, 66 + 54 * i, name, "small")
    for i in range(8):
        c.box(130 + 76 * i, 44, 72, 32, "a", f"{'KV'[i % 2]} {i // 2 + 1}")
    for group in (0, 1):
        y, x = 98 + 54 * group, 150 + 95.0 * group
        for tile in range(3):
            c.box(x, y, 95, 34, "d" if group else "c", f"QK {tile + 1}, PV {tile}" if tile else "QK 1")
            if x + 190 <= 750:
                c.box(x + 95, y, 95, 34, "b", f"softmax {tile + 1}")
            c.box(x, 206, 95, 34, "d" if group else "c", f"group {group}")
            x += 190
    c.arrow((130, 260), (716, 260))
    c.text(722, 264, "time", "small muted")
    c.text(
        130,
        280,
        "QK n: scores of tile n are issued together with PV n - 1, the values of the tile before.",
        "small muted",
    )
    return c


def masks() -> Canvas:
    """Tiles of a mask of joined documents: hidden, whole, mixed."""
    documents, tile, tiles = (70, 112, 48, 90), 16, 20
    document = [i for i, length in enumerate(documents) for _ in range(length)]
    c = Canvas(760, 400, "Tiles that a mask hides, shows wholly, or shows in part")
    c.text(20, 24, "Causal attention inside four joined documents, tile by tile", "title")
    counts = {"o": 0, "a": 0, "b": 0}
    for i, j in itertools.product(range(tiles), range(tiles)):
        rows, columns = range(i * tile, (i + 1) * tile), range(j * tile, (j + 1) * tile)
        seen = sum(q >= k and document[q] == document[k] for q in rows for k in columns)
        fill = "o" if seen == 0 else "a" if seen == tile * tile else "b"
        counts[fill] += 1
        c.box(70 + 17 * j, 44 + 17 * i, 15, 15, fill, radius=1)
    c.text(70, 398, "tokens", "small muted")
    c.text(20, 58, "rows", "small muted")
    names = (
        ("o", "hidden", "not loaded, not computed"),
        ("a", "whole", "computed without a mask"),
        ("b", "mixed", "bits or the function decide"),
    )
    for i, (fill, name, what) in enumerate(names):
        y = 60 + 64 * i
        c.box(450, y, 22, 22, fill)
        c.text(484, y + 12, f"{name}: {counts[fill]} of {tiles * tiles} tiles", "title")
        c.text(484, y + 29, what, "small muted")
    c.text(450, 280, "A kernel before attention finds the kinds, once a plan.", "small")
    c.text(450, 300, "CTAs claim units from a queue, most tiles first,", "small")
    c.text(450, 320, "as the host does not know which tiles are visible.", "small")
    return c


def mixed_batches() -> Canvas:
    """SMs over time: one plan for all against two launches side by side."""
    c = Canvas(760, 270, "A batch of decodes and prompts: one after the other, or side by side on shares of the SMs")
    for x, name in ((20, "One launch after the other"), (400, "Two launches side by side")):
        c.text(x, 24, name, "title")
        c.text(x, 134, "SMs", "small muted")
        c.arrow((x + 36, 224), (x + 330, 224))
        c.text(x + 300, 242, "time", "small muted")
    c.box(56, 44, 120, 172, "a", "decodes", "wait for memory")
    c.box(180, 44, 130, 172, "c", "prompts", "wait for matmuls")
    c.box(436, 44, 206, 93, "a", "decodes", "54% of the SMs", "keep the memory busy")
    c.box(436, 141, 206, 75, "c", "prompts", "the other SMs")
    c.arrow((642, 36), (642, 222), dashed=True, head=False)
    c.text(648, 130, "both end together", "small muted")
    c.text(400, 262, "Two streams; an event before and after joins them.", "small muted")
    return c


def graphs() -> Canvas:
    """Host, plan memory and stream over three steps."""
    c = Canvas(760, 300, "A captured launch reads the newest plan at every replay")
    c.text(20, 24, "One captured launch, another plan at every replay", "title")
    for y, name in ((66, "host"), (132, "pinned slots"), (198, "stream")):
        c.text(20, y, name, "small")
    for i in range(3):
        x = 110 + 215 * i
        c.box(x, 44, 90, 36, "abc"[i], f"plan {i + 1}", f"{(3, 64, 1)[i]} requests")
        c.box(x + 30, 112, 90, 32, "abc"[i], f"slot {i % 2}")
        c.box(x + 50, 178, 50, 36, "abc"[i], "copy")
        c.box(x + 104, 178, 104, 36, "n", "replay", "all CTAs start")
        c.arrow((x + 60, 80), (x + 60, 110))
        c.arrow((x + 75, 144), (x + 75, 176))
    c.box(110, 244, 640, 34, "n", "plan memory on the card: it never moves, and each CTA reads its own range of it")
    for i in range(3):
        x = 110 + 215 * i
        c.arrow((x + 75, 214), (x + 75, 242))
        c.arrow((x + 156, 243), (x + 156, 216))
    return c


def jit_and_cache() -> Canvas:
    """The four places in which a kernel is looked for."""
    c = Canvas(760, 300, "Where a kernel is looked for, and what its key is made of")
    c.text(20, 24, "Where a kernel is looked for", "title")
    c.box(20, 62, 110, 52, "n", "KernelSpec", "and target")
    places = (
        ("this process", "loaded kernels"),
        ("AOT folder", "in a wheel"),
        ("cache", "a folder on disk"),
        ("compile", "g++, nvcc, NVRTC"),
    )
    for i, (name, what) in enumerate(places):
        x = 170 + 150 * i
        c.box(x, 62, 110, 52, "aabd"[i], name, what)
        c.arrow((x - 40 if i else 130, 88), (x - 2, 88))
        if i:
            c.text(x - 38, 80, "no", "small muted")
        if i < 3:
            c.arrow((x + 55, 114), (x + 55, 146))
            c.text(x + 62, 134, "found", "small muted")
    c.box(170, 148, 410, 34, "c", "loaded: cuModuleLoad or dlopen")
    c.arrow((675, 114), (675, 165), (582, 165))
    c.text(592, 184, "published by one rename", "small muted")
    c.text(20, 220, "The key: a hash of", "title")
    parts = ("rendered source", "headers that it includes", "flags and target", "the spec")
    for i, part in enumerate(parts):
        c.box(20 + 184 * i, 234, 170, 34, "n", part)
    c.text(20, 290, "Not of paths, times or compilers: an entry may be copied to another machine.", "small muted")
    return c


def cascade() -> Canvas:
    """Shared pages and own pages of four requests."""
    c = Canvas(760, 250, "Two levels: one list of pages for all rows, and a list for each request")
    c.text(20, 24, "Level 0: read once for all rows", "title")
    c.text(470, 24, "Level 1: a list for each request", "title")
    for page in range(10):
        c.box(110 + 32 * page, 90, 28, 60, "a", str(page))
    for request in range(4):
        y = 44 + 44 * request
        c.box(20, y, 60, 30, "n", f"row {request}")
        c.arrow((80, y + 15), (108, 120 if request in (1, 2) else 98 if request == 0 else 142))
        c.box(500, y, 60, 30, "b", f"page {10 + request}")
        c.arrow((432, 120), (456, 120), (456, y + 15), (498, y + 15), dashed=True, head=False)
        c.box(620, y, 90, 30, "c", f"output {request}")
        c.arrow((560, y + 15), (618, y + 15))
    c.text(110, 176, "shared pages", "small muted")
    c.text(330, 236, "The states of both levels are merged by their log-sum-exps.", "small muted")
    return c


def vllm_blocks() -> Canvas:
    """The layout of one block of vLLM's caches."""
    c = Canvas(760, 250, "One block of vLLM's key cache and value cache")
    c.text(20, 24, "Keys: pieces of 16 bytes, tokens next to each other", "title")
    for piece, token in itertools.product(range(4), range(8)):
        c.box(20 + 42 * token, 40 + 34 * piece, 38, 28, "ab"[piece % 2], f"t{token}")
    for piece in range(4):
        c.text(360, 58 + 34 * piece, f"piece {piece}", "small muted")
    c.text(440, 24, "Values: by column", "title")
    for column, token in itertools.product(range(6), range(8)):
        c.box(440 + 32 * token, 40 + 23 * column, 29, 19, "cd"[column % 2], radius=1)
    for column in range(6):
        c.text(704, 54 + 23 * column, f"dim {column}", "small muted")
    c.text(
        20,
        200,
        "Memory runs along the rows of each picture. Neighbouring lanes copy neighbouring bytes,",
        "small muted",
    )
    c.text(
        20,
        218,
        "and both layouts stay as they are in shared memory: ldmatrix without a transpose reads them.",
        "small muted",
    )
    return c


PICTURES: tuple[Callable[[], Canvas], ...] = (
    *(planner, plan_format, decode_sm90, prefill_sm90, masks),
    *(mixed_batches, graphs, jit_and_cache, cascade, vllm_blocks),
)


def main() -> None:
    for picture in PICTURES:
        path = FOLDER / f"{picture.__name__}.svg"
        drawn = picture().svg()
        if not path.exists() or path.read_text() != drawn:
            path.write_text(drawn)
            print(path.name)


if __name__ == "__main__":
    main()
