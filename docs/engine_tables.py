"""Tables of docs/results.md about engines."""

from __future__ import annotations

from table_parts import OWN, Line, table


def own_engine_table(lines: list[Line]) -> str:
    """Tokens per second of this repository's engine; the ratio is flashpage's (a line's first) to each library's."""
    rows = []
    for line in lines:
        flashpage_rate = next(iter(line["figures"].values()))["tokens_per_s"]
        for label, own in line["figures"].items():
            rate = own["tokens_per_s"]
            cells = [
                label,
                own["how"],
                f"{rate:,}",
                f"{own['decode_step_us']:,}",
                f"{flashpage_rate / rate:.3f}",
                own["wrong"],
            ]
            rows.append([line["case"], *cells])
    return table(["trace", "attention", "decode", "tokens/s", "decode step us", "flashpage's / own", "wrong"], rows)


def own_steps_table(lines: list[Line]) -> str:
    """The parts of a step of this repository's engine."""
    kinds = ("step_us", "attention_us", "products_us", "other_us", "plan_us", "host_step_us")
    rows = [
        [line["case"], label, *(f"{own[kind]:,.0f}" for kind in kinds)]
        for line in lines
        for label, own in line["figures"].items()
    ]
    words = (
        "Means of profiled steps in microseconds; what the kernels leave of a step is time in which the card waits. "
        "Planning is the host's time; the last column is the host's median of a whole step, its waits included."
    )
    header = ["trace", "attention", "step", "kernels of attention", "matrix products", "other kernels", "planning"]
    return f"{words}\n\n{table([*header, 'host'], rows)}"


def engine_table(lines: list[Line]) -> str:
    """Rates of an engine with each attention backend; the ratio is flashpage's to the best other one's."""
    kinds, rows = ("new_per_s", "decode_per_s", "prefill_per_s"), []
    for line in lines:
        figures = line["figures"]
        others = [rates for label, rates in figures.items() if label not in OWN]
        for label, own in figures.items():
            has_ratios = label in OWN and bool(others)
            words = [f"{own[kind] / max(x[kind] for x in others):.3f}" if has_ratios else "" for kind in kinds]
            cells = [f"{own[kind]:,.0f}" for kind in kinds]
            rows.append([line["case"], line["ranks"], label, *cells, *words])
    header = ["trace", "cards", "attention", "new/s", "decode/s", "prefill/s", "ratio", "of decode", "of prefill"]
    words = "Whole runs of an engine by its host's clock; decode leaves out the time to the first tokens."
    return f"{words} Ratios are flashpage's rate to that of the best other backend.\n\n{table(header, rows)}"


def steps_table(lines: list[Line]) -> str:
    """A step's time by attention backend."""
    kinds, rows = ("step_us", "attention_us", "plan_us", "host_step_us"), []
    for line in lines:
        rows += [
            [line["case"], label, *(f"{own[kind]:,.0f}" for kind in kinds)] for label, own in line["figures"].items()
        ]
    words = (
        "Means of profiled steps in microseconds. Kernels of attention that run side by side count once; FLASHINFER's "
        "planning also waits for the card. The last column is the host's median of a whole step."
    )
    if lines[0]["section"] == "sglang-steps":
        words += " The profiler follows Python's functions, too, which makes the host slower."
    return f"{words}\n\n{table(['trace', 'attention', 'step', 'kernels of attention', 'planning', 'host'], rows)}"


def torch_table(lines: list[Line]) -> str:
    """Times under torch's functions; the ratio is that of the best other one to flashpage."""
    names = list(dict.fromkeys(name for line in lines for name in line["us"]))
    rows = []
    for line in lines:
        us = line["us"]
        cells = [f"{us[name]:,.1f}" if name in us else "" for name in names]
        rows.append(
            [line["case"], *cells, f"{min(v for n, v in us.items() if n != 'flashpage') / us['flashpage']:.3f}"]
        )
    found = table(["case", *(f"{name} us" for name in names), "best other / flashpage"], rows)
    reasons = dict.fromkeys(f"{name}: {why}" for line in lines for name, why in line.get("refused", {}).items())
    return found + "".join(f"\n\nNot timed where a cell is empty: {reason}." for reason in reasons)


def parallel_table(lines: list[Line]) -> str:
    """Times of the slowest rank, and of one card with the whole context."""
    rows = []
    for line in lines:
        times = [f"{us:,.1f}" for us in line["us"].values()]
        rows.append([line["case"], line["ranks"], *times, f"{line['ratio']:.2f}", f"{line['error']:.1e}"])
    return table(["case", "cards", *(f"{what} us" for what in lines[0]["us"]), "one / spread", "error"], rows)


def ranks_table(lines: list[Line]) -> str:
    """Tokens and log-probabilities of an engine next to those of another."""
    rows = []
    for line in lines:
        logprobs = [f"{line['median']:.4f}", f"{line['most']:.3f}", f"{line['gap']:.3f}" if line["gap"] else ""]
        rows.append([line["case"], line["ranks"], f"{line['equal']} of {line['prompts']}", *logprobs])
    words = "Log-probabilities are compared as long as the tokens are equal; the gap is between the best two tokens."
    header = ["engine", "ranks", "equal prompts", "median difference", "most", "most gap where tokens differ"]
    return f"{words}\n\n{table(header, rows)}"


def growth_table(lines: list[Line]) -> str:
    """Memory that an engine keeps after many requests."""
    rows = [[line["case"], line["answered"], f"{line['card_mib']:.1f}", f"{line['host_mib']:.1f}"] for line in lines]
    words = "Half of the 1,000 requests are aborted; the first 200 do not count."
    return f"{words}\n\n{table(['engine', 'answered', 'MiB more on the card', 'on the host'], rows)}"
