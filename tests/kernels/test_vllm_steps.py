"""How the CTAs of vLLM's operators divide tokens: every token of every head once, and pieces that can be merged."""

from __future__ import annotations

import ctypes
import random
from typing import NamedTuple

import numpy as np
import pytest
from native_build import shared_library

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.kernels import blocks, devices

BEGINS, ENDS, GOES_ON, IS_CONTINUED = 1, 2, 4, 8  # include/flashpage/kernels/blocks/steps.h, BlockStep::Flags
PARTITION = 512


class Step(NamedTuple):
    """A row of tests/native/block_steps_check.cpp's output."""

    cta: int
    sequence: int
    kv_head: int
    row_tile: int
    token: int
    length: int
    flags: int
    num_pieces: int

    @property
    def unit(self) -> tuple[int, int, int]:
        return self.sequence, self.kv_head, self.row_tile


def walk(lens: list[int], heads: int, row_tiles: int, tile_kv: int, partitions: int, ctas: int) -> list[Step]:
    seq_lens = np.array(lens, np.int32)
    params = native.BlockAttentionParams(
        seq_lens=seq_lens.ctypes.data,
        num_seqs=len(lens),
        num_kv_heads=heads,
        row_tiles=row_tiles,
        max_tokens=10_000,
        partitions=partitions,
    )
    rows = np.empty((heads * row_tiles * sum(-(-n // tile_kv) for n in lens) + 1, len(Step._fields)), np.int32)
    library = ctypes.CDLL(str(shared_library("block_steps_check.cpp")))
    count = library.walk_steps(ctypes.byref(params), tile_kv, ctas, rows.ctypes.data_as(ctypes.c_void_p))
    return [Step(*map(int, row)) for row in rows[:count]]


def random_case(seed: int) -> tuple[list[int], int, int, int, int, int]:
    choose = random.Random(seed)
    longest = choose.choice((1, 70, 600, 5000))
    lens = [choose.choice((0, 1, longest, choose.randint(0, longest))) for _ in range(choose.randint(0, 40))]
    heads, row_tiles, tile_kv = choose.choice((1, 3, 8)), choose.choice((1, 2)), choose.choice((64, 128))
    return lens, heads, row_tiles, tile_kv, choose.choice((0, 10)), choose.choice((1, 2, 13, 264))


@pytest.mark.parametrize("seed", range(60))
def test_every_token_once(seed: int) -> None:
    lens, heads, row_tiles, tile_kv, partitions, ctas = case = random_case(seed)
    steps = walk(*case)
    wanted = {
        (i, head, tile, token)
        for i, length in enumerate(lens)
        for head in range(heads)
        for tile in range(row_tiles)
        for token in range(0, length, tile_kv)
    }
    found = [(*step.unit, step.token) for step in steps]
    assert len(found) == len(set(found)) and set(found) == wanted
    assert all(step.length == lens[step.sequence] for step in steps)
    grain = PARTITION if partitions else tile_kv
    loads = [sum(-(-n // grain) for n in lens) * heads * row_tiles] if steps else [0]
    shares = [len({(*s.unit, s.token // grain) for s in steps if s.cta == cta}) for cta in range(ctas)]
    assert max(shares) <= max(-(-loads[0] // ctas), 1 if partitions else -(-128 // tile_kv))


@pytest.mark.parametrize("seed", range(60))
def test_pieces_begin_and_end(seed: int) -> None:
    """A piece is a CTA's run of steps in one unit (v2: partition); the first piece of a cut unit has their number."""
    *_, partitions, ctas = case = random_case(seed)
    pieces: list[list[Step]] = []
    for cta in range(ctas):
        is_open = False
        for step in (s for s in walk(*case) if s.cta == cta):
            assert is_open == (not step.flags & BEGINS)
            if not is_open:
                pieces.append([])
            pieces[-1].append(step)
            is_open = not step.flags & ENDS
        assert not is_open
    by_unit: dict[tuple[int, ...], list[list[Step]]] = {}
    for piece in pieces:
        part = piece[0].token // PARTITION if partitions else 0
        assert {s.unit for s in piece} == {piece[0].unit}
        by_unit.setdefault((*piece[0].unit, part), []).append(piece)
    for found in by_unit.values():
        assert len(found) == 1 or not partitions
        first = found[0][0].cta
        assert [piece[0].cta for piece in found] == list(range(first, first + len(found)))
        for i, piece in enumerate(found):
            assert all(bool(s.flags & GOES_ON) == (i > 0) for s in piece)
            assert bool(piece[-1].flags & IS_CONTINUED) == (i + 1 < len(found))
        if len(found) > 1:
            assert found[0][-1].num_pieces == len(found)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 112, 120, 128, 192, 256])
@pytest.mark.parametrize("kv_dtype", [DType.BFLOAT16, DType.FLOAT8_E4M3])
@pytest.mark.parametrize("group", [4, 40])
def test_tiles_of_small_cards_divide_partitions(head_dim: int, kv_dtype: DType, group: int) -> None:
    """test_shared_memory.py tests on compiled kernels that they fit 99 KiB."""
    tile = blocks.decode_spec(DType.BFLOAT16, kv_dtype, head_dim, group, devices.named("RTX 4090")).tile
    assert tile.stages >= 2
    assert PARTITION % tile.tile_kv == 0 and tile.tile_kv // tile.warps_kv in (16, 32)
