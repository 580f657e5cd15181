"""Schedules of kernels for the plan explorer: `python docs/explorer/table.py` writes docs/explorer/table.json.

The planner needs a schedule (csrc/flashpage.h, fp_schedule), which the choice of a kernel gives, in Python. The table
has the schedules of usual heads on the table's cards: one for decode, and for other batches one for each number of
packed rows (a power of two) and each class of contexts. tests/project/test_explorer.py holds it current.
"""

from __future__ import annotations

import base64
import ctypes
import itertools
import json
from pathlib import Path
from typing import Any

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.kernels import devices
from flashpage.kernels.choose import MANY_ROWS
from flashpage.kernels.context_classes import CLASSES
from flashpage.kernels.context_lengths import ContextLengths
from flashpage.kernels.devices import Device
from flashpage.kernels.options import Options, check_options
from flashpage.kernels.work import Problem
from flashpage.plan.report.on_card import schedule_on_card

TABLE = Path(__file__).with_name("table.json")
CARDS = ("H200", "H100", "B200", "A100", "L40S", "RTX 4090", "RTX 5090", "GB10")
HEADS = ((32, 8), (64, 8), (28, 4), (32, 32), (8, 1))
HEAD_DIMS = (64, 128, 256)
PAGE_SIZE = 16
ROWS = [1 << i for i in range(MANY_ROWS.bit_length())]


def options_of(heads: tuple[int, int], head_dim: int, rows_of_all: int) -> Options:
    """bf16, causal, as `flashpage plan` has them. `rows_of_all`: of every request; 0: requests differ."""
    return check_options(
        kv_source="paged",
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim_qk=head_dim,
        head_dim_vo=head_dim,
        page_size=PAGE_SIZE,
        q_data_type=DType.BFLOAT16,
        kv_data_type=DType.BFLOAT16,
        o_data_type=DType.BFLOAT16,
        causal=True,
        window_left=-1,
        logits_soft_cap=None,
        pos_encoding_mode="NONE",
        has_mask=False,
        variant=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=rows_of_all,
    )


class Table:
    """Schedules by number; equal ones have one."""

    def __init__(self) -> None:
        self.schedules: dict[tuple[str, str], int] = {}

    def number(self, options: Options, card: Device, packed_rows: int, contexts: Any) -> int:
        choice, schedule = schedule_on_card(Problem(options, packed_rows, contexts=contexts), card)
        return self.schedules.setdefault((choice.kernel.name, text_of(schedule)), len(self.schedules))

    def row(self, card: Device, heads: tuple[int, int], head_dim: int) -> dict[str, Any]:
        """A kernel's schedules for heads on a card."""
        group = heads[0] // heads[1]
        decode, other = options_of(heads, head_dim, 1), options_of(heads, head_dim, 0)
        contexts = ContextLengths(other, card).table
        usual = 1 << (group - 1).bit_length()
        rows = [[self.number(other, card, packed, kind) for kind in CLASSES] for packed in ROWS]
        row = {"decode": self.number(decode, card, usual, CLASSES[0]), "contexts": text_of(contexts)}
        # From some size on, more rows change nothing.
        while len(rows) > 1 and rows[-1] == rows[-2]:
            rows.pop()
        return row | {"rows": rows}


def text_of(struct: Any) -> str:
    """The bytes of a struct, which has the same layout in WebAssembly."""
    return base64.b64encode(bytes(struct)).decode()


def make() -> str:
    """The text of table.json."""
    table, rows = Table(), {}
    for name, heads, head_dim in itertools.product(CARDS, HEADS, HEAD_DIMS):
        rows[f"{name} {heads[0]}/{heads[1]} {head_dim}"] = table.row(devices.named(name), heads, head_dim)
    lists = {"cards": CARDS, "heads": [f"{q}/{kv}" for q, kv in HEADS], "head_dims": HEAD_DIMS, "page_size": PAGE_SIZE}
    fields = [
        (name, "f" if kind is ctypes.c_float else "i", ctypes.sizeof(kind) // 4)
        for name, kind in native.Schedule._fields_
    ]
    found = {**lists, "fields": fields, "schedules": list(table.schedules), "rows": rows}
    return json.dumps(found, separators=(",", ":")).replace('},"', '},\n"').replace('],["', '],\n["') + "\n"


if __name__ == "__main__":
    TABLE.write_text(make())
