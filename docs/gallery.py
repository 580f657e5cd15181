"""Draws the gallery and writes its page: `python docs/gallery.py`.

Plans, tiles, pages and blocks come from the library itself, measured numbers from docs/results. The timelines of the
two Hopper kernels are drawn from docs/results/timeline-decode.json and timeline-prefill.json, which a card writes:

    flashpage trace lognormal:16:2048 --repeats 1 --json docs/results/timeline-decode.json
    flashpage trace 4x2048 --q-lens 4x2048 --repeats 1 --json docs/results/timeline-prefill.json
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pictures import FOLDER, Canvas

from flashpage.cli.values import distribution
from flashpage.kernels.tensor_maps import box_tokens
from flashpage.plan import Plan, plan_lengths
from flashpage.plan.report.picture import Segment
from flashpage.serving.blocks import BlockPool

CTAS = 12
COLOURS = "abcde"
RESULTS = FOLDER.parent / "results"
PHASES = {"start": "n", "load": "b", "compute": "c", "write": "a", "merge": "e"}


class Figure(NamedTuple):
    """A picture and its words on the page."""

    draw: Callable[[], Canvas]
    title: str
    words: str


def plan_of(kv_lens: list[int], q_lens: list[int] | None = None, ctas: int = CTAS, heads: int = 1) -> Plan:
    return plan_lengths(q_lens, kv_lens, num_q_heads=4 * heads, num_kv_heads=heads, num_ctas=ctas)


def lanes(
    c: Canvas,
    x: float,
    y: float,
    segments: Iterable[Segment],
    scale: float,
    colour: Callable[[Segment], str],
    height: float = 11,
) -> None:
    """CTAs as rows from (x, y), `scale` pixels a nanosecond."""
    for s in segments:
        width = max(0.6, (s.end - s.start) * scale - 0.8)
        c.box(x + s.start * scale, y + height * s.cta, width, height - 2, colour(s), radius=1)


def end_of(segments: Iterable[Segment]) -> float:
    return max(s.end for s in segments)


def by_request(s: Segment) -> str:
    return COLOURS[s.request % len(COLOURS)]


def fixed_split(kv_lens: list[int], splits: int) -> list[Segment]:
    """Each request in equal pieces, which the free CTA takes in order: what a grid of (request, split) does."""
    schedule = plan_of(kv_lens).schedule
    free = [(0.0, cta) for cta in range(CTAS)]
    segments = []
    for request, tokens in enumerate(kv_lens):
        for _ in range(splits):
            start, cta = heapq.heappop(free)
            end = start + schedule.ns_per_piece + schedule.ns_per_token * tokens / splits
            segments.append(Segment(cta, request, start, end, True))
            heapq.heappush(free, (end, cta))
    return segments


def gallery_lengths() -> Canvas:
    """Even and lognormal lengths, under the planner and a fixed split."""
    c = Canvas(760, 420, "Even and lognormal lengths: the planner next to a fixed split")
    batches = {"8 requests of 4,096 tokens": [4096] * 8, "8 lognormal lengths, the same tokens": []}
    batches["8 lognormal lengths, the same tokens"] = sorted(distribution("lognormal", 8, 4096), key=lambda n: n % 97)
    for row, (name, kv_lens) in enumerate(batches.items()):
        plans = {"the planner": plan_of(kv_lens).segments(), "a fixed split in 3": fixed_split(kv_lens, 3)}
        scale = 330 / max(map(end_of, plans.values()))
        c.text(20, 24 + 205 * row, name, "title")
        for column, (way, segments) in enumerate(plans.items()):
            x, y = 20 + 375 * column, 40 + 205 * row
            lanes(c, x, y + 14, segments, scale, by_request)
            c.text(x, y + 4, f"{way}: {end_of(segments) / 1e3:.0f} us predicted", "small muted")
            c.arrow((x, y + 152), (x + 345, y + 152))
    c.text(20, 416, "12 CTAs as rows, time to the right, one colour a request.", "small muted")
    return c


def gallery_cascade() -> Canvas:
    """A shared prefix read once, and by every request."""
    own, prefix, requests = 512, 8192, 16
    c = Canvas(760, 250, "Sixteen requests with one prefix: each reads it, or all read it once")
    alone = plan_of([prefix + own] * requests)
    shared = plan_lengths([requests], [prefix], num_q_heads=4, num_kv_heads=1, num_ctas=CTAS, causal=False)
    rest = plan_of([own] * requests)
    scale = 700 / end_of(alone.segments())
    c.text(20, 24, f"16 requests read {prefix + own:,} tokens each: {_mib(alone)} of K and V", "title")
    lanes(c, 20, 36, alone.segments(), scale, by_request, 7)
    first = end_of(shared.segments())
    words = f"A cascade: the prefix once for all rows, then each request's own 512: {_mib(shared, rest)}"
    c.text(20, 148, words, "title")
    lanes(c, 20, 160, shared.segments(), scale, lambda s: "n", 7)
    moved = (s._replace(start=s.start + first, end=s.end + first) for s in rest.segments())
    lanes(c, 20, 160, moved, scale, by_request, 7)
    return c


def _mib(*plans: Plan) -> str:
    return f"{sum(plan.traffic().kv_bytes for plan in plans) / 2**20:.0f} MiB"


def gallery_mixed() -> Canvas:
    """Decodes and prompts side by side, on shares of the SMs."""
    c = Canvas(760, 310, "A mixed batch: decodes on a share of the SMs, prompts on the others")
    decodes, prompts, sms = [6000] * 24, [1024, 700], 24

    def parts(few: int) -> tuple[Plan, Plan]:
        return plan_of(decodes, ctas=few), plan_of(prompts, prompts, sms - few)

    few = min(range(1, sms), key=lambda n: max(end_of(plan.segments()) for plan in parts(n)))
    first, second = (plan.segments() for plan in parts(few))
    scale = 640 / max(end_of(first), end_of(second))
    c.text(20, 24, f"24 decodes on {few} of {sms} SMs, two prompts on the other {sms - few}, at the same time", "title")
    lanes(c, 100, 40, first, scale, lambda s: "ad"[s.request % 2], 9)
    lanes(c, 100, 44 + 9 * few, second, scale, lambda s: "cb"[s.request % 2], 4.5)
    c.text(20, 52, "decodes", "small muted")
    c.text(20, 56 + 9 * few, "prompts", "small muted")
    c.text(
        100, 296, "The share is the one with which the longer part takes least. Prompts: two CTAs an SM.", "small muted"
    )
    return c


def gallery_masks() -> Canvas:
    """Four masks as tiles."""
    tiles, tile, window, prefix = 16, 8, 40, 48
    documents = [i for i, length in enumerate((30, 50, 20, 28)) for _ in range(length)]
    kinds: dict[str, Callable[[int, int], bool]] = {
        "causal": lambda q, k: k <= q,
        f"window of {window}": lambda q, k: q - window <= k <= q,
        "joined documents": lambda q, k: k <= q and documents[q] == documents[k],
        f"prefix of {prefix}": lambda q, k: k <= q or k < prefix,
    }
    c = Canvas(760, 250, "Four masks as tiles: hidden, whole, and in part")
    for i, (name, sees) in enumerate(kinds.items()):
        left, counts = 20 + 186 * i, {"o": 0, "a": 0, "b": 0}
        for row, column in itertools.product(range(tiles), range(tiles)):
            rows, columns = range(row * tile, row * tile + tile), range(column * tile, column * tile + tile)
            seen = sum(sees(q, k) for q in rows for k in columns)
            fill = "o" if not seen else "a" if seen == tile * tile else "b"
            counts[fill] += 1
            c.box(left + 10 * column, 40 + 10 * row, 9, 9, fill, radius=0)
        c.text(left, 26, name, "title")
        c.text(left, 220, f"{counts['a']} whole, {counts['b']} in part", "small muted")
    c.text(
        20,
        244,
        "Green tiles are computed without a mask, orange ones with it; the others are not loaded.",
        "small muted",
    )
    return c


def gallery_pages() -> Canvas:
    """The cost of small pages: copies of a tile, and measured times."""
    cases = {1: "batch 64, context 4k, page 1", 16: "batch 64, context 4k", 64: "batch 64, context 4k, page 64"}
    lines = [json.loads(line) for path in sorted(RESULTS.glob("*.jsonl")) for line in path.read_text().splitlines()]
    decodes = [line for line in lines if line["section"] == "decode" and ", planned as " not in line["card"]]
    times = {line["case"]: line["us"]["flashpage"] for line in decodes if "flashpage" in line["us"]}
    card = decodes[0]["card"]
    c = Canvas(760, 250, "What a page costs: copies for a tile of 32 tokens, and measured times")
    c.text(20, 24, "A tile of 32 tokens of K", "title")
    for i, page in enumerate(cases):
        y, copies = 40 + 62 * i, 32 // box_tokens(page, 32)
        c.text(20, y + 20, f"pages of {page}", "small")
        for copy in range(copies):
            width = 320 / copies
            c.box(110 + width * copy, y, width - 1, 34, COLOURS[i], radius=1)
        c.text(
            440,
            y + 14,
            f"{copies} {'copy' if copies == 1 else 'copies'} a tile, {4096 // page:,} page numbers a request",
            "small",
        )
        c.text(440, y + 32, f"{times[cases[page]]:.1f} us", "title")
    c.text(20, 240, f"Measured: 64 requests of 4k tokens, bf16, 32/8 heads, on an {card}.", "small muted")
    return c


def gallery_cache() -> Canvas:
    """Blocks of a pool over time: shared, owned, kept after their request, taken again."""
    blocks, steps, prompt = 40, 72, [b"system 0", b"system 1", b"system 2", b"system 3"]
    pool, running, drawn = BlockPool(blocks + 1), {}, []
    for step in range(steps):
        for name in [name for name, (_, end) in running.items() if end <= step]:
            pool.release(running.pop(name)[0])
        if step % 5 == 0 and not 25 < step < 58 and pool.num_free >= 8:
            shared = pool.share(prompt)
            own = pool.allocate(len(prompt) - len(shared) + 1 + step % 3)
            for block, known in zip(own, prompt[len(shared) :], strict=False):
                pool.publish(block, known)
            running[step] = (shared + own, step + 16 + 7 * (step % 4))
        for name, (held, _) in running.items():
            if (step - name) % 5 == 4 and pool.num_free:
                held += pool.allocate(1)
        owners: dict[int, list[int]] = {}
        for name, (held, _) in running.items():
            for block in held:
                owners.setdefault(block, []).append(name)
        kept = set(pool.share(prompt))
        pool.release(sorted(kept))
        drawn.append((owners, kept))
    c = Canvas(760, 400, "Blocks of the paged cache over time")
    c.text(20, 24, "A row is a block of the cache, time goes to the right", "title")
    for step, (owners, kept) in enumerate(drawn):
        for block in range(1, blocks + 1):
            names = owners.get(block, [])
            fill = "n" if len(names) > 1 else COLOURS[names[0] // 5 % 4] if names else "e" if block in kept else ""
            if fill:
                c.box(20 + 10 * step, 36 + 8 * (block - 1), 9, 7, fill, radius=0)
    for i, (fill, words) in enumerate(
        (("n", "the prompt's blocks, shared"), ("a", "one request's"), ("e", "free, but still found"))
    ):
        c.box(20 + 230 * i, 372, 14, 14, fill)
        c.text(42 + 230 * i, 384, words, "small muted")
    return c


def timeline(name: str, kernel: str) -> Canvas:
    """Phases of the first CTAs of a run that was recorded on a card."""
    events = json.loads((RESULTS / f"timeline-{name}.json").read_text())["traceEvents"]
    measured = [event for event in events if event["ph"] == "X" and event["pid"] % 10 == 1]
    predicted = [event for event in events if event["ph"] == "X" and event["pid"] % 10 == 2]
    run = max(event["pid"] // 10 for event in measured)
    end = max(event["ts"] + event["dur"] for event in measured if event["pid"] // 10 == run)
    c = Canvas(760, 420, f"{kernel} in time, measured")
    c.text(20, 24, f"{kernel}: the first 24 CTAs of a run of {end:.1f} us, and below each one its plan", "title")
    shown, planned = _of(measured, run), _of(predicted, run)
    longest = max(end, *(event["ts"] + event["dur"] for event in planned))
    for event in shown:
        c.box(*_place(event, longest, 0, 9), PHASES[event["name"]], radius=0)
    for event in planned:
        c.box(*_place(event, longest, 10, 3), COLOURS[int(event["name"].split()[1]) % 5], radius=0)
    for i, (phase, fill) in enumerate(PHASES.items()):
        c.box(60 + 110 * i, 398, 14, 14, fill)
        c.text(80 + 110 * i, 410, phase, "small muted")
    return c


def _of(events: list[dict[str, Any]], run: int) -> list[dict[str, Any]]:
    return [event for event in events if event["pid"] // 10 == run and _cta(event) < 24]


def _cta(event: dict[str, Any]) -> int:
    return int(event["tid"]) - 1  # threads of a trace are numbered from 1 on


def _place(event: dict[str, Any], longest: float, top: float, height: float) -> tuple[float, float, float, float]:
    scale = 680 / longest
    return 60 + event["ts"] * scale, 40 + 14.5 * _cta(event) + top, max(0.4, event["dur"] * scale), height


def gallery_decode_ring() -> Canvas:
    """decode_sm90, measured."""
    return timeline("decode", "decode_sm90")


def gallery_prefill_ring() -> Canvas:
    """prefill_sm90, measured."""
    return timeline("prefill", "prefill_sm90")


FIGURES = (
    Figure(
        gallery_lengths,
        "Lengths that differ",
        "A fixed number of pieces fits even lengths. With lengths as a server has them, the longest request decides "
        "the time of a fixed split; the planner cuts where the load needs it ([The planner](planner.md)).",
    ),
    Figure(
        gallery_cascade,
        "A prefix that requests share",
        "A cascade reads shared pages once for all rows, and merges the states ([Cascades](guides/cascade.md)).",
    ),
    Figure(
        gallery_mixed,
        "Decodes and prompts in one batch",
        "Decodes wait for memory, prompts for matmuls; they run at the same time ([Mixed batches](mixed_batches.md)).",
    ),
    Figure(
        gallery_decode_ring,
        "The decode kernel in time",
        "Measured by the kernel's own stamps ([See it at work](guides/watching.md)).",
    ),
    Figure(
        gallery_prefill_ring,
        "The prefill kernel in time",
        "Measured by the kernel's own stamps ([See it at work](guides/watching.md)).",
    ),
    Figure(
        gallery_masks,
        "Masks by tiles",
        "Tiles that a mask hides are not loaded, and tiles that it shows wholly need no mask ([Masks](masks.md)).",
    ),
    Figure(
        gallery_pages,
        "The cost of a page",
        "Smaller pages need more copies and more page numbers. The time hardly changes, because loading warps run "
        "ahead.",
    ),
    Figure(
        gallery_cache,
        "The life of the cache",
        "The prompt's first blocks are shared by all requests that begin with them, and stay until a new block needs "
        "their place ([Serving](reference/serving.md)).",
    ),
)


def drawn_figures() -> list[Figure]:
    """The figures whose numbers are here; those of a card may be missing."""
    needs = {gallery_decode_ring: "decode", gallery_prefill_ring: "prefill"}
    return [f for f in FIGURES if f.draw not in needs or (RESULTS / f"timeline-{needs[f.draw]}.json").exists()]


def page() -> str:
    lines = ["# Gallery", "", "Pictures that explain the library. `python docs/gallery.py` draws them."]
    for figure in drawn_figures():
        lines += [
            "",
            f"## {figure.title}",
            "",
            figure.words,
            "",
            f"![{figure.title}](assets/{figure.draw.__name__}.svg)",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    files = {FOLDER / f"{figure.draw.__name__}.svg": figure.draw().svg() for figure in drawn_figures()}
    for path, text in {**files, FOLDER.parent / "gallery.md": page()}.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path.name)


if __name__ == "__main__":
    main()
