"""Properties of every plan, checked on the plan's bytes.

The lengths are expanded to every row tile; nothing here shares code or closed forms with include/flashpage/plan/.
"""

from __future__ import annotations

import numpy as np
from planner_batches import Batch, Cutting, Planned, indptr

from flashpage.native import records


def all_units(batch: Batch, tile_q: int) -> dict[str, np.ndarray]:
    """Every (request, KV head, row tile) of a batch, with the token range that any of its rows sees."""
    tiles = -(-(batch.served_q_lens.astype(np.int64) * batch.group) // tile_q)
    request = np.repeat(np.arange(len(tiles)), tiles)
    tile = np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    q_len, kv_len = batch.q_lens[request].astype(np.int64), batch.kv_lens[request].astype(np.int64)
    first_row = tile * tile_q // batch.group
    last_row = np.minimum((tile + 1) * tile_q, q_len * batch.group) - 1
    rows = last_row + 1 - tile * tile_q
    last_row //= batch.group
    begin, end = np.zeros_like(kv_len), kv_len.copy()
    if batch.causal:
        end = np.maximum(0, kv_len - q_len + last_row + 1)
    if batch.window_left >= 0:
        begin = np.minimum(np.maximum(0, kv_len - q_len + first_row - batch.window_left), end)
    heads = np.arange(batch.num_kv_heads)
    per_head = {"request": request, "tile": tile, "rows": rows, "begin": begin, "end": end}
    out = {name: np.repeat(a, len(heads)) for name, a in per_head.items()}
    out["kv_head"] = np.tile(heads, len(request))
    return out


def expand(planned: Planned) -> dict[str, np.ndarray]:
    """All items as their CTAs read them, one row for each unit, in the order of the CTA's work."""
    batch, cutting = planned.batch, planned.cutting
    ctas = planned.ctas
    count = ctas["end"] - ctas["begin"]
    assert (count >= 0).all()
    cta = np.repeat(np.arange(len(ctas)), count)
    item_index = np.arange(len(cta)) - np.repeat(np.cumsum(count) - count, count) + ctas["begin"][cta]
    items = planned.items[item_index]
    units = items["num_units"].astype(np.int64)
    assert (units >= 1).all()
    row = np.repeat(np.arange(len(items)), units)
    step = np.arange(len(row)) - np.repeat(np.cumsum(units) - units, units)
    items, cta, item_index = items[row], cta[row], item_index[row]
    assert (items["first_packed_row"] % cutting.tile_q == 0).all()
    tiles = -(-(items["q_len"].astype(np.int64) * batch.group) // cutting.tile_q)
    position = items["first_packed_row"] // cutting.tile_q + step
    is_partial, place = items["partial_row"] >= 0, ctas["place"][cta].astype(np.int32)
    assert (items["num_units"][is_partial] == 1).all()
    assert (items["merge"][~is_partial] == -1).all()
    return {
        "cta": cta,
        "item": item_index,
        "request": items["request"],
        "kv_head": items["kv_head"] + ctas["kv_head"][cta] + position // tiles,
        "tile": position % tiles,
        "kv_begin": items["kv_begin"].astype(np.int64),
        "kv_end": items["kv_end"].astype(np.int64),
        "partial_row": np.where(is_partial, items["partial_row"] + ctas["partial_row"][cta], -1),
        "piece": items["piece"],
        "merge": np.where(is_partial, items["merge"] + place * planned.header["merges_of_place"], -1),
    }


def check(planned: Planned) -> dict[str, np.ndarray]:
    """Checks everything except balance. Returns the expanded units with their costs."""
    batch, cutting = planned.batch, planned.cutting
    _check_result(planned)
    _check_items(planned)
    _check_firsts(planned)
    units = all_units(batch, cutting.tile_q)
    seen = expand(planned)
    order = np.lexsort((seen["piece"], seen["tile"], seen["kv_head"], seen["request"]))
    pieces = {name: a[order] for name, a in seen.items()}
    key_order = np.lexsort((units["tile"], units["kv_head"], units["request"]))
    units = {name: a[key_order] for name, a in units.items()}

    # Units in the two lists are in the same order: every one occurs, and only cut units occur several times.
    same = np.ones(len(order), bool)
    same[1:] = False
    for name in ("request", "kv_head", "tile"):
        same[1:] |= pieces[name][1:] != pieces[name][:-1]
    starts = np.flatnonzero(same)
    assert len(starts) == len(units["request"]), "a row tile is missing or made up"
    for name in ("request", "kv_head", "tile"):
        assert (pieces[name][starts] == units[name]).all(), f"{name} of a unit is wrong"
    unit_of = np.cumsum(same) - 1
    count = np.diff(np.append(starts, len(order)))
    is_cut = pieces["partial_row"] >= 0
    assert (is_cut == (count[unit_of] > 1)).all(), "exactly the cut units have partials"
    assert (pieces["piece"] == np.arange(len(order)) - starts[unit_of]).all()

    # The kernel clips the tokens of whole units; pieces of a cut unit cover exactly the visible range, end to end.
    begin, end = units["begin"][unit_of], units["end"][unit_of]
    whole = ~is_cut
    assert (pieces["kv_begin"][whole] <= begin[whole]).all() and (pieces["kv_end"][whole] >= end[whole]).all()
    first, last = same, np.append(same[1:], True)
    assert (pieces["kv_begin"][is_cut & first] == begin[is_cut & first]).all()
    assert (pieces["kv_end"][is_cut & last] == end[is_cut & last]).all()
    inner = np.flatnonzero(is_cut & ~first)
    assert (pieces["kv_begin"][inner] == pieces["kv_end"][inner - 1]).all()
    assert (pieces["kv_begin"][inner] % cutting.tile_kv == 0).all() or cutting.fixed_piece_tokens
    assert (pieces["kv_end"][is_cut] > pieces["kv_begin"][is_cut]).all()
    _check_pieces(planned, pieces, units, unit_of, count, is_cut)
    _check_merges(planned, pieces, units, unit_of, starts, count, is_cut)

    tokens = np.where(is_cut, pieces["kv_end"] - pieces["kv_begin"], end - begin)
    fixed = np.where(pieces["piece"] > 0, cutting.ns_per_piece, cutting.ns_per_unit)
    cost = fixed + ns_per_token(batch, cutting, pieces["request"]) * tokens
    has_least = ~is_cut & (batch.q_lens[pieces["request"]] * batch.group <= cutting.tile_q)
    pieces["cost"] = np.where(has_least, np.maximum(cost, cutting.least_ns_of_unit), cost)
    return pieces


def _rounds(planned: Planned, merge: np.void) -> int:
    """Rounds of loads in which eight warps, each with eight loads in flight, read the partials of a merge."""
    jobs, partials = int(merge["num_rows"]) * planned.cutting.row_jobs, int(merge["num_partials"])
    if jobs > 16:
        return -(-partials // 2) * -(-jobs // 32)
    return -(-partials // (4 if jobs > 8 else 8))


def _check_result(planned: Planned) -> None:
    batch, result, header = planned.batch, planned.result, planned.header
    for name in ("num_ctas", "num_items", "num_merges", "num_partial_rows", "used_bytes"):
        assert header[name] == getattr(result, name), name
    assert result.most_merge_rounds == max((_rounds(planned, merge) for merge in planned.merges), default=0)
    assert result.total_q == batch.q_start + batch.q_lens.sum()
    assert result.total_kv == batch.kv_lens.sum()
    assert result.max_q_len == max(batch.q_lens, default=0) and result.max_kv_len == max(batch.kv_lens, default=0)
    used = planned.ctas["end"] > planned.ctas["begin"]
    size = max(1, int(header["cluster_size"]))  # whole clusters; the last CTAs of one may have no work
    assert header["num_ctas"] == -(-(np.flatnonzero(used)[-1] + 1 if used.any() else 0) // size) * size
    size = records.PLAN_HEADER.itemsize + len(used) * records.CTA_START.itemsize
    size += planned.items.nbytes + planned.merges.nbytes + planned.arrivals.nbytes
    assert header["used_bytes"] == size


def _check_items(planned: Planned) -> None:
    batch, items = planned.batch, planned.items
    request = items["request"]
    pages = -(-batch.kv_lens.astype(np.int64) // batch.page_size) if batch.page_size else batch.kv_lens.astype(np.int64)
    mask_bytes = -(-(batch.q_lens.astype(np.int64) * batch.kv_lens) // 8) * batch.has_custom_mask
    cells = -(-batch.served_q_lens.astype(np.int64) * batch.group // planned.cutting.tile_q)
    cells *= -(-batch.kv_lens // (32 * planned.cutting.tile_kv))
    cells *= batch.has_mask_tiles and not batch.has_custom_mask
    expected = {
        "kv_offset": indptr(pages, batch.kv_start)[:-1],
        "mask_offset": indptr(mask_bytes + cells)[:-1],
        "q_begin": indptr(batch.q_lens, batch.q_start)[:-1],
        "q_len": batch.q_lens,
        "kv_len": batch.kv_lens,
    }
    for name, values in expected.items():
        assert (items[name] == values[request]).all(), name
    assert (planned.result.mask_bytes, planned.result.tile_cells) == (mask_bytes.sum(), cells.sum())
    assert (items["kv_begin"] >= 0).all() and (items["kv_end"] <= items["kv_len"]).all()


def _check_firsts(planned: Planned) -> None:
    """A CTA's first item is stored next to its range, with that CTA's own head and partials; else zeros."""
    works = planned.ctas["end"] > planned.ctas["begin"]
    ctas, firsts = planned.ctas[works], planned.firsts[works]
    expected = planned.items[ctas["begin"]]
    expected["kv_head"] += ctas["kv_head"]
    expected["partial_row"] += np.where(expected["partial_row"] >= 0, ctas["partial_row"], 0)
    assert (firsts == expected).all(), "a CTA's first item is not that of its list"
    assert (planned.firsts[~works] == np.zeros(1, records.WORK_ITEM)).all()


def _check_own_ctas(planned: Planned, pieces: dict[str, np.ndarray], unit_of: np.ndarray, count: np.ndarray) -> None:
    """A cluster for each unit: its CTA p has piece p and nothing else."""
    cutting, size = planned.cutting, int(planned.header["cluster_size"])
    clusters = planned.header["num_ctas"] // size
    assert clusters * size == planned.header["num_ctas"] <= cutting.num_ctas
    assert clusters <= cutting.clusters[size.bit_length() - 1] and len(count) == clusters
    cluster, rank = np.divmod(pieces["cta"], size)
    assert (rank == pieces["piece"]).all() and len(np.unique(pieces["cta"])) == len(pieces["cta"])
    first = np.unique(unit_of, return_index=True)[1]
    assert (cluster == cluster[first][unit_of]).all() and len(np.unique(cluster[first])) == clusters
    assert ((count & (count - 1)) == 0).all() and (count <= size).all(), "pieces are no power of two"


def _check_pieces(planned, pieces, units, unit_of, count, is_cut) -> None:
    cutting = planned.cutting
    if planned.header["cluster_size"]:
        _check_own_ctas(planned, pieces, unit_of, count)
        assert (units["rows"][count > 1] <= cutting.cluster_rows).all()
        steps = -(-units["end"] // cutting.tile_kv) - units["begin"] // cutting.tile_kv
        longest = -(-steps // count) * cutting.tile_kv
        assert (pieces["kv_end"] - pieces["kv_begin"] <= longest[unit_of])[is_cut].all(), "pieces are not equal"
        least = -(-cutting.cluster_piece_tokens // cutting.tile_kv)
        assert (steps >= count * least)[count > 1].all(), "pieces are too short"
        return
    length = pieces["kv_end"] - pieces["kv_begin"]
    if cutting.fixed_piece_tokens > 0:
        chunk = cutting.fixed_piece_tokens
        chunks = np.maximum(1, -(-units["end"] // chunk) - units["begin"] // chunk)
        chunks[units["end"] == units["begin"]] = 1
        assert (count == chunks).all(), "a fixed split has one piece for each chunk"
        assert (pieces["kv_begin"][is_cut & (pieces["piece"] > 0)] % chunk == 0).all()
        return
    if cutting.fixed_piece_tokens < 0:
        assert not is_cut.any()
    assert (length[is_cut] >= cutting.min_piece_tokens).all(), "a piece is too short"
    if cutting.max_pieces:
        assert (count <= cutting.max_pieces).all(), "a unit has too many pieces"


def _check_merges(planned, pieces, units, unit_of, starts, count, is_cut) -> None:
    """Partials lie end to end and do not overlap; the merges name each once, in the order of pieces, once a row."""
    rows = units["rows"]
    begins, sizes = pieces["partial_row"][is_cut], rows[unit_of][is_cut]
    covered = _coverage(begins, sizes, int(planned.header["num_partial_rows"]))
    assert (covered == 1).all(), "partials overlap, or rows belong to none"

    merges, tile_q = planned.merges, planned.cutting.tile_q
    assert (merges["num_rows"] >= 1).all() and (merges["num_rows"] <= planned.cutting.merge_rows).all()
    tiles, offset = np.divmod(merges["first_packed_row"].astype(np.int64), tile_q)
    code = _code(units["request"], units["kv_head"], units["tile"])
    merge_code = _code(merges["request"], merges["kv_head"], tiles)
    unit = np.searchsorted(code, merge_code)
    assert (code[unit] == merge_code).all(), "a merge of a unit that does not exist"
    assert (merges["q_begin"] == indptr(planned.batch.q_lens, planned.batch.q_start)[merges["request"]]).all()
    assert (merges["num_partials"] == count[unit]).all() and (count[unit] > 1).all()
    assert (offset + merges["num_rows"] <= rows[unit]).all()

    rows_to_merge = np.where(count > 1, rows, 0)
    row_base = indptr(rows_to_merge)
    covered = _coverage(row_base[unit] + offset, merges["num_rows"], int(row_base[-1]))
    assert (covered == 1).all(), "a row of a cut unit is merged twice or never"

    merge = np.repeat(np.arange(len(merges)), merges["num_partials"])
    partial = np.arange(len(merge)) - indptr(merges["num_partials"])[merge]
    listed = merges["partial_row"][merge] - offset[merge] + partial * merges["partial_stride"][merge]
    own = pieces["partial_row"][starts[unit[merge]] + partial]
    assert (own == listed).all(), "a merge reads other partials than its unit's, or in another order"
    _check_arrivals(planned, pieces, is_cut, rows[unit_of])


def _check_arrivals(planned: Planned, pieces: dict[str, np.ndarray], is_cut: np.ndarray, rows: np.ndarray) -> None:
    """Every piece arrives at the first merge of its unit, for its own head; a unit's other merges follow the first."""
    assert (planned.arrivals == 0).all(), "a fresh plan's counters"
    merges, index, rows = planned.merges, pieces["merge"][is_cut], rows[is_cut]
    mine = {name: a[is_cut] for name, a in pieces.items()}
    assert ((index >= 0) & (index < len(merges))).all()
    merge = merges[index]
    assert (merge["request"] == mine["request"]).all() and (merge["kv_head"] == mine["kv_head"]).all()
    assert (merge["first_packed_row"] == mine["tile"] * planned.cutting.tile_q).all()
    assert (merge["partial_row"] + mine["piece"] * merge["partial_stride"] == mine["partial_row"]).all()

    first = np.unique(index)
    arriving = np.bincount(index, minlength=len(merges))
    assert (arriving[first] == merges["num_partials"][first]).all(), "a merge waits for more or fewer pieces than come"
    length = np.zeros(len(merges), np.int64)
    length[index] = -(-rows // planned.cutting.merge_rows)
    length = length[first]
    assert (first == indptr(length)[:-1]).all() and length.sum() == len(merges), "a unit's merges are not adjacent"
    step = np.arange(len(merges)) - np.repeat(first, length)
    for name in ("request", "kv_head", "num_partials", "partial_stride"):
        assert (merges[name] == np.repeat(merges[name][first], length)).all(), name
    for name in ("first_packed_row", "partial_row"):
        assert (merges[name] == np.repeat(merges[name][first], length) + step * planned.cutting.merge_rows).all(), name


def _coverage(begins: np.ndarray, sizes: np.ndarray, total: int) -> np.ndarray:
    """How many of the ranges contain each of `total` numbers."""
    assert len(begins) == 0 or (begins.min() >= 0 and (begins + sizes).max() <= total)
    steps = np.zeros(total + 1, np.int64)
    np.add.at(steps, begins, 1)
    np.add.at(steps, begins + sizes, -1)
    return np.cumsum(steps)[:-1]


def _code(request: np.ndarray, kv_head: np.ndarray, tile: np.ndarray) -> np.ndarray:
    """A number for each unit, in the order of (request, KV head, row tile)."""
    return (request.astype(np.int64) << 36) + (kv_head.astype(np.int64) << 24) + tile


def ns_per_token(batch: Batch, cutting: Cutting, request: np.ndarray) -> np.ndarray:
    """The number of visible tokens in a unit of each request."""
    has_few_rows = 2 * batch.q_lens[request] * batch.group <= cutting.tile_q
    return cutting.ns_per_token * np.where(has_few_rows, cutting.few_rows_cost, 1.0)


def loads(planned: Planned, pieces: dict[str, np.ndarray]) -> np.ndarray:
    """Nanoseconds of each of the schedule's CTAs."""
    return np.bincount(pieces["cta"], pieces["cost"], planned.cutting.num_ctas)


def granularity(batch: Batch, cutting: Cutting) -> float:
    """Nanoseconds of the costliest part of the work that cannot be divided further, and of one piece.

    A part shorter than two shortest pieces and a step of the tile may stay whole. In a team that is not full, a CTA
    takes each part for several KV heads.
    """
    units = all_units(batch, cutting.tile_q)
    length = units["end"] - units["begin"]
    shortest = np.full(len(length), cutting.min_piece_tokens)
    if cutting.max_pieces:
        shortest = np.maximum(shortest, length // (cutting.max_pieces + 1) + 1)
    stretch = np.minimum(length, 2 * shortest + cutting.tile_kv)
    if cutting.fixed_piece_tokens > 0:
        stretch = np.minimum(length, cutting.fixed_piece_tokens)
    elif cutting.fixed_piece_tokens < 0:
        stretch = length
    heads = most_heads_of_a_cta(cutting.num_ctas, batch.num_kv_heads) if not cutting.heads_on_axis else 1
    costliest = cutting.ns_per_unit + float((ns_per_token(batch, cutting, units["request"]) * stretch).max(initial=0.0))
    return heads * (max(costliest, cutting.least_ns_of_unit) + cutting.ns_per_piece)


def check_balance(planned: Planned, pieces: dict[str, np.ndarray]) -> None:
    """The costliest CTA is at most 3% over the mean, or exceeds it by at most the granularity of the work; without cuts
    also by the cost of a merge.

    If the group does not divide the row tile, the planner knows a unit's tokens to within one.
    """
    batch, cutting = planned.batch, planned.cutting
    load = loads(planned, pieces)
    mean, most = float(load.mean()), float(load.max(initial=0.0))
    inexact = cutting.tile_q % batch.group != 0 and (batch.causal or batch.window_left >= 0)
    units = np.bincount(pieces["cta"], minlength=1).max() if inexact else 0
    allowed = max(1.03 * mean, mean + granularity(batch, cutting)) + units * cutting.ns_per_token
    is_whole = planned.result.num_merges == 0  # so units may have been dealt, to avoid a merge's cost
    assert most <= allowed + is_whole * cutting.ns_per_merge


def most_heads_of_a_cta(num_ctas: int, num_kv_heads: int) -> int:
    """KV heads of a CTA in the smallest team: full teams, then teams of a divisor of the remaining heads."""
    left, smallest = num_ctas, num_kv_heads
    while left:
        smallest = max(d for d in range(1, min(left, num_kv_heads) + 1) if num_kv_heads % d == 0)
        left -= smallest
    return num_kv_heads // smallest
