"""The sections of docs/results.md, and their tables: lines of docs/results/*.jsonl in, Markdown out."""

from __future__ import annotations

import statistics

from engine_tables import (
    engine_table,
    growth_table,
    own_engine_table,
    own_steps_table,
    parallel_table,
    ranks_table,
    steps_table,
    torch_table,
)
from sweep_causes import cause
from table_parts import UNITS, Line, name, table

TITLES = {  # sections in the order of the page
    "decode": "Decode",
    "more-decode": "Decode, other shapes",
    "contexts": "Decode over the context",
    "prefill": "Prefill and append",
    "more-prefill": "Prefill and append, other shapes",
    "small-prefill": "Small prompts",
    "options": "Options that models need",
    "option-costs": "Costs of options",
    "fp8-kv": "Decode over fp8 keys and values with bf16 queries",
    "fp8-prefill": "Prefill with e4m3 queries, keys and values",
    "sweep": "Drawn cases",
    "mixed": "Decodes and prompts in one call",
    "formats": "Caches of 4 and 8 bits",
    "mla": "Latent rows (MLA)",
    "more-mla": "Latent rows (MLA), other shapes",
    "mla-fp8": "Latent rows (MLA) in fp8, by pages",
    "expanded": "Prompts over expanded latent rows",
    "sparse": "Latent rows of 656 bytes, by lists of tokens and by pages",
    "e4m3-forms": "Prefill over an e4m3 cache, in four forms",
    "sparse-calls": "Sparse prefill, and decode from two caches in rows of 584 bytes",
    "energy": "Energy of long prompts",
    "counters": "Hardware counters of a call",
    "engine": "flashpage's engine, tokens per second by attention",
    "engine-steps": "Where a step of flashpage's engine spends its time",
    "host": "Host time of plan and run",
    "cold": "First calls of a process",
    "sglang": "SGLang, tokens per second by attention backend",
    "vllm": "vLLM, tokens per second by attention backend",
    "transformers": "transformers, tokens per second of `generate_batch` by attention",
    "vllm-steps": "Where a step of vLLM spends its time",
    "sglang-steps": "Where a step of SGLang spends its time",
    "torch-attention": "PyTorch's attention functions",
    "parallel": "Decode over a context that lies on several cards",
    "ranks": "Engines of several ranks, and with other options, next to others",
    "growth": "Memory after many requests",
    "case-table": "The case table with the tiles and plans of other cards",
}


def origin(lines: list[Line]) -> str:
    """The sentence that says where a table's figures come from."""
    runs = {(line["date"], line["commit"], line["command"]) for line in lines}
    texts = [f"{date}, commit {commit}, `{command}`" for date, commit, command in sorted(runs)]
    versions = {f"{key} {value}" for line in lines for key, value in line["versions"].items()}
    text = f"{lines[0]['machine']}; {'; '.join(texts)}. Versions: {', '.join(sorted(versions))}."
    if cards := sorted({line["uuid"] for line in lines if line.get("uuid")}):
        text += f" Card{'s' if len(cards) > 1 else ''} {', '.join(cards)}."
    clocks = [line["clocks"] for line in lines if line.get("clocks")]
    during = [found for found in clocks if found.get("samples")]
    after = [found for found in clocks if not found.get("samples")]
    return text + spans("The card after each case", after) + spans("The card inside of the timed rounds", during)


def spans(what: str, clocks: list[Line]) -> str:
    """The sentence on the least and the largest clock, power and temperature."""
    if not clocks:
        return ""
    found = [
        f"{min(c[key] for c in clocks):.0f} to {max(c[key] for c in clocks):.0f} {unit}"
        for key, unit in (("sm_mhz", "MHz"), ("watts", "W"), ("celsius", "degrees Celsius"))
    ]
    return f" {what}: {', '.join(found)}."


def card_table(lines: list[Line]) -> str:
    mine = "flashpage" if "flashpage" in lines[0]["us"] else "flashpage sm80"
    peers = sorted({label for line in lines for label in line["us"] if label != mine})
    units = {line["unit"]: UNITS[line["unit"]] for line in lines}
    unit = next(iter(units.values())) if len(units) == 1 else "rate"
    rows = []
    for line in lines:
        times = [f"{line['us'][peer]:,.1f}" if peer in line["us"] else "" for peer in peers]
        ratio = f"{line['ratio']:.3f}" if line["ratio"] else ""
        own = f"{line['us'][mine]:,.1f}"
        errors = [f"{line['errors'][who]:.1e}" if who in line["errors"] else "" for who in (mine, line["best_peer"])]
        rate = f"{line['rate']:,.0f}" + ("" if len(units) == 1 else f" {units[line['unit']]}")
        rows.append([line["case"], own, rate, *times, ratio, *errors])
    header = ["case", "flashpage us", unit, *(f"{name(p)} us" for p in peers), "best peer / flashpage"]
    header += ["error", "best peer's"]
    return widened_products(lines[0]) + smaller_card(lines) + table(header, rows) + mean_of(lines)


def widened_products(line: Line) -> str:
    """The paragraph on Ada's fp8 products before a table of a Hopper card, which has none for mma.sync."""
    if line["section"] != "fp8-prefill" or ", planned as " not in line["card"]:
        return ""
    words = [
        "On this card ptxas 13.0 makes each mma.sync m16n8k32 of e4m3 into 12 conversions to fp16 (F2FP) and two",
        "products of fp16 (HMMA m16n8k16), but for sm_89 and sm_120 into one product of e4m3 (QMMA). So the ratio says",
        "nothing of an Ada card's fp8 rate, by its datasheet twice that of fp16, and the error holds for sums in fp32,",
        "of which QMMA may keep fewer bits.",
    ]
    return " ".join(words) + "\n\n"


def smaller_card(lines: list[Line]) -> str:
    """The paragraph on what a peer was told of the card, before a table under another card's profile."""
    if not any("shared_limit.so" in line["command"] for line in lines):
        return ""
    words = [
        "`shared_limit.so` (tests/bench/shared_limit.cpp) tells peers that a multiprocessor has the other card's",
        "shared memory, as the profile tells flashpage. flashpage plans for the other card's number of",
        "multiprocessors, too; peers use all of this card's, and unless the command says `SHARED_HELD=1` as many of",
        "their CTAs share a multiprocessor as fit its own 228 KiB: by fa2's rule two at 192/128 and at d 256, where",
        "the other card has room for one.",
    ]
    return " ".join(words) + "\n\n"


def host_table(lines: list[Line]) -> str:
    """Host times with their targets, and FlashInfer's times if any line has them."""
    has_peer, rows = any("flashinfer" in line["us"] for line in lines), []
    for line in lines:
        own, peer = line["us"]["flashpage"], line["us"].get("flashinfer")
        cells = [f"{peer:.1f}", f"{peer / own:.2f}"] if peer else ["", ""]
        targets = [line["must"], line["goal"] or ""]
        rows.append([line["case"], line["batch"], f"{own:.1f}", *(cells if has_peer else []), *targets])
    peer_header = ["FlashInfer us", "FlashInfer / flashpage"] if has_peer else []
    return table(["what", "batch", "us", *peer_header, "must", "goal"], rows)


def cold_table(lines: list[Line]) -> str:
    """Seconds of a process's first calls, with and without the import of torch, and their targets."""
    labels = list(dict.fromkeys(label for line in lines for label in line["seconds"]))
    rows = []
    for line in lines:
        times = [times.get(label) for times in (line["seconds"], line["with_torch"]) for label in labels]
        rows.append([line["case"], *("" if n is None else f"{n:.3f}" for n in times), line["must"] or ""])
    words = [
        "A call is a wrapper's construction, plan and run, in a new process.",
        "The seconds are those of the library's import and the call, of a cached kernel those of the call alone after",
        "one of the other kind; with torch they begin with the process.",
    ]
    header = ["first call", *(f"{name(label)} s{more}" for more in ("", ", with torch") for label in labels), "must"]
    return f"{' '.join(words)}\n\n{table(header, rows)}"


ENOUGH = 1.02  # ratio that a drawn case should reach


def sweep_table(lines: list[Line]) -> str:
    """A summary by the best peer, and the cases that are slower than it."""
    compared = [line for line in lines if line["ratio"]]
    groups = {name(peer): [x for x in compared if x["best_peer"] == peer] for peer in best_peers(compared)}
    summary = []
    for label, group in (groups | {"all": compared}).items():
        ratios = [line["ratio"] for line in group]
        below = [sum(ratio < limit for ratio in ratios) for limit in (1, ENOUGH)]
        shares = [f"{count} ({count / len(ratios):.1%})" for count in below]
        summary.append([label, len(ratios), f"{mean_ratio(group):.3f}", *shares])
    rows = []
    for line in sorted(compared, key=lambda line: line["ratio"]):
        if line["ratio"] < ENOUGH:
            peer = line["best_peer"]
            times = [f"{line['us']['flashpage']:,.1f}", f"{name(peer)} {line['us'][peer]:,.1f}"]
            rows.append([line["case"], *times, f"{line['ratio']:.3f}", cause(line)])
    header = ["best peer", "cases", "geometric mean of best peer / flashpage", "below 1.00", f"below {ENOUGH}"]
    words = [
        f"{len(lines)} cases were drawn, {len(compared)} of which a peer computes as well.",
        f"Below are those in which the best peer takes less than {ENOUGH} of flashpage's time.",
        "The last column is a cause that [tries](tried.md) name for cases of its kind.",
        "It was not measured for each case.",
    ]
    behind = table(["case", "flashpage us", "best peer us", "best peer / flashpage", "why"], rows)
    return f"{table(header, summary)}\n\n{' '.join(words)}\n\n{behind}"


def best_peers(lines: list[Line]) -> list[str]:
    """The peer that is best most often comes first."""
    labels = [line["best_peer"] for line in lines]
    return sorted(set(labels), key=lambda label: (-labels.count(label), label))


def mixed_table(lines: list[Line]) -> str:
    """Times of one call for both parts, next to the fastest peer's call of each part."""
    rows = []
    for line in lines:
        us = line["us"]
        times = [f"{us[who]:,.1f}" if who in us else "" for who in ("flashpage", "peers")]
        ratio = f"{line['ratio']:.3f}" if line["ratio"] else ""
        peers = []
        for part in ("decodes", "prompts"):
            label = line["best"][part]
            library, comma, form = label.partition(", ")
            peers.append(f"{name(library)}{comma}{form} {line['parts'][part][label]:,.1f}" if label else "")
        errors = [f"{line['errors'][who]:.1e}" if who in line["errors"] else "" for who in ("flashpage", "peers")]
        rows.append([line["case"], times[0], *peers, times[1], ratio, line["must"], *errors])
    words = [
        "A step has decodes and prompts, or chunks of prompts: flashpage computes them in one call.",
        "The peers in order are the fastest peer's call for the decodes and that for the prompts, one after the other.",
        "Peers may have prompts without earlier context as contiguous tensors; flashpage reads pages.",
    ]
    header = ["step", "flashpage us", "decodes' best peer us", "prompts' best peer us", "peers in order us"]
    header += ["peers / flashpage", "must", "error", "peers'"]
    return f"{' '.join(words)}\n\n{table(header, rows)}{mean_of(lines)}"


def mean_ratio(lines: list[Line]) -> float:
    """Geometric mean."""
    return statistics.geometric_mean(line["ratio"] for line in lines)


def mean_of(lines: list[Line]) -> str:
    """The sentence on the ratios of all lines, after a table."""
    lines = [line for line in lines if line["ratio"]]
    if not lines:
        return ""
    lowest = min(line["ratio"] for line in lines)
    return f"\n\nGeometric mean of the ratios {mean_ratio(lines):.3f}, lowest {lowest:.3f}."


def energy_table(lines: list[Line]) -> str:
    """Time and energy of a call, next to the peer's."""
    rows = []
    for line in lines:
        own, peer = "flashpage", next(label for label in line["us"] if label != "flashpage")
        cells = [f"{line[key][who]:{form}}" for key, form in _ENERGY.items() for who in (own, peer)]
        ratios = [f"{line[key][peer] / line[key][own]:.3f}" for key in ("us", "joules")]
        rows.append([line["case"], name(peer), *cells, *ratios])
    columns = [f"{who}{unit}" for unit in ("us", "J", "W", "MHz") for who in ("", "peer's ")]
    words = "The libraries are called in turns, as long and as often as the command says. Joules: the board's counter."
    header = ["case", "peer", *columns, "peer's time / flashpage's", "peer's energy / flashpage's"]
    return f"{words}\n\n{table(header, rows)}"


_ENERGY = {"us": ",.0f", "joules": ".3f", "watts": ".0f", "sm_mhz": ".0f"}


def counters_table(lines: list[Line]) -> str:
    """Counters of each kernel of a call, by ncu."""
    kernels = [(line, kernel) for line in lines for kernel in line["kernels"]]
    names = list(dict.fromkeys(key for _, kernel in kernels for key in kernel["counts"]))
    rows = []
    for line, kernel in kernels:
        counts = kernel["counts"]
        stalls = ", ".join(f"{reason} {warps}" for reason, warps in kernel["stalls"].items())
        cells = [f"{counts[key]:,}" if key in counts else "" for key in names]
        rows.append(
            [line["case"].removesuffix(f", {line['library']}"), name(line["library"]), kernel["kernel"], *cells, stalls]
        )
    words = [
        "One call under ncu, which empties the caches before each of its passes.",
        "The last column has the reasons for which most warps of a scheduler wait whenever it issues an instruction.",
    ]
    header = ["case", "library", "kernel", *names, "warps that wait"]
    return f"{' '.join(words)}\n\n{table(header, rows)}"


def costs_table(lines: list[Line]) -> str:
    """An option's time next to that of plain attention, and of another library with the option."""
    peers = sorted({label for line in lines for label in line["us"]} - {"without", "with"})
    rows = []
    for line in lines:
        us, per_key = line["us"], line["per_key"] if line["visible"] < 1 else None
        cells = [f"{us[label]:,.1f}" if label in us else "" for label in ("without", "with", *peers)]
        rows.append([line["case"], *cells, f"{us['without'] / us['with']:.3f}", "" if per_key is None else per_key])
    words = "The last column is, for windows, the time of a visible key next to that of full attention."
    header = [
        "case",
        "without us",
        "with us",
        *(f"with, {name(peer)} us" for peer in peers),
        "ratio",
        "per visible key",
    ]
    return f"{words}\n\n{table(header, rows)}"


def formats_table(lines: list[Line]) -> str:
    more = "; `append` are rows over a cached prefix, `fill` writes"
    return shares_table(lines, "float8_e4m3fn", f"Microseconds, and in brackets the share of e4m3's{more}.")


def shares_of_bf16(lines: list[Line]) -> str:
    return shares_table(lines, "bf16", "Microseconds, and in brackets the share of bf16's.")


def sparse_calls_table(lines: list[Line]) -> str:
    return shares_table(lines, "flashpage", "Microseconds, and in brackets the share of flashpage's.")


def shares_table(lines: list[Line], of: str, words: str) -> str:
    """Times by format, and their share of one format's."""
    names = list(dict.fromkeys(name for line in lines for name in line["us"]))
    rows = []
    for line in lines:
        us = line["us"]
        cells = [f"{us[name]:,.1f}" if name in us else "" for name in names]
        base = us.get(of)
        if base is not None:
            cells = [f"{cell} ({us[name] / base:.2f})" if cell else "" for cell, name in zip(cells, names, strict=True)]
        rows.append([line["case"], *cells])
    return f"{words}\n\n{table(['case', *names], rows)}"


def case_table(lines: list[Line]) -> str:
    """Outcomes of the case table under profiles of cards."""
    header = ["planned as", "kernels by", "cases that passed", "failed", "largest error"]
    header += [f"largest share of the limit of {what}" for what in ("a row", "an element", "an LSE")]
    rows = []
    for line in lines:
        shares = ["" if share is None else f"{share:.2f}" for share in line["shares"].values()]
        failed = ", ".join(line["failed"]) or "none"
        error = "" if line["frobenius"] is None else f"{line['frobenius']:.1e}"  # not kept
        rows.append([line["case"], line["compiler"], line["passed"], failed, error, *shares])
    return table(header, rows)


TABLES = {  # of other sections: card_table
    "sweep": sweep_table,
    "mixed": mixed_table,
    "formats": formats_table,
    "sparse": shares_of_bf16,
    "sparse-calls": sparse_calls_table,
    "e4m3-forms": shares_of_bf16,
    "energy": energy_table,
    "counters": counters_table,
    "engine": own_engine_table,
    "option-costs": costs_table,
    "host": host_table,
    "cold": cold_table,
    "sglang": engine_table,
    "vllm": engine_table,
    "transformers": engine_table,
    "engine-steps": own_steps_table,
    "vllm-steps": steps_table,
    "sglang-steps": steps_table,
    "torch-attention": torch_table,
    "parallel": parallel_table,
    "ranks": ranks_table,
    "growth": growth_table,
    "case-table": case_table,
}
