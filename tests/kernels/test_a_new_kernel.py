"""As CONTRIBUTING says, a new kernel is a header folder, a Python file and a row; a new card is a row."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import with_fake_driver

import flashpage
from flashpage import cli, kernels, native
from flashpage.jit import manifest
from flashpage.kernels import ATTENTION, devices
from flashpage.kernels.devices import Device
from flashpage.plan import plan_lengths

pytestmark = pytest.mark.usefixtures("quick_kernels")

HEADER = r"""// Textbook attention of one row at a time.
#pragma once
#include <cmath>
#include <vector>

#include "flashpage/cpu/kv_tile.h"
#include "flashpage/cpu/unit.h"

namespace flashpage::cpu {

template <class Traits>
void attend_row(const AttentionParams& p, const WorkItem& item, const Unit<Traits::tile_q>& unit, i32 r) {
  const Row& row = unit.rows[r];
  const i64 q_place = (item.q_begin + row.row) * p.q_row_stride + row.head * p.q_head_stride;
  const float* q = static_cast<const float*>(p.q) + q_place;
  std::vector<double> weights, out(Traits::head_dim_vo);
  double sum = 0;
  for (i32 token = row.begin; token < row.end; ++token) {
    KvTile<Traits> tile = {token, 1};
    locate_rows(p, item, unit.kv_head, tile);
    double score = 0;
    for (int i = 0; i < Traits::head_dim_qk; ++i) score += double{q[i]} * tile.keys[0][i];
    const double weight = std::exp(score * row.scale);
    sum += weight;
    for (int i = 0; i < Traits::head_dim_vo; ++i) out[i] += weight * tile.values[0][i];
  }
  const bool is_cut = item.partial_row >= 0;
  const i64 place = is_cut ? i64{item.partial_row} + r : i64{item.q_begin} + row.row;
  float* to = is_cut ? p.partial_out + place * Traits::head_dim_vo
                     : static_cast<float*>(p.out) + place * p.out_row_stride + row.head * p.out_head_stride;
  for (int i = 0; i < Traits::head_dim_vo; ++i) to[i] = sum > 0 ? float(out[i] / sum) : 0.0f;
  const float lse = sum > 0 ? float(std::log2(sum)) : -INFINITY;
  if (is_cut) p.partial_lse[place] = lse;
  else if (p.lse) p.lse[place * p.num_q_heads + row.head] = lse;
}

template <class Traits>
void plain_attention(const AttentionParams& params, const VariantArgs&, i32 cta_begin, i32 cta_end) {
  Unit<Traits::tile_q> unit;
  for (i32 cta = cta_begin; cta < cta_end; ++cta)
    for_each_item(params.plan, cta, [&](const WorkItem& item) {
      for (i32 u = 0; u < item.num_units; ++u) {
        make_unit(params, item, u, unit);
        for (i32 r = 0; r < unit.num_rows; ++r) attend_row<Traits>(params, item, unit, r);
      }
    });
}

}  // namespace flashpage::cpu
"""
HOME = '''
"""Textbook attention, for fp32 on the CPU."""
from pathlib import Path

from flashpage.base.dtypes import DType
from flashpage.kernels.cpu_attention import KERNEL as USUAL
from flashpage.kernels.kernel import AttentionKernel, dtypes, head_dims
from flashpage.kernels.tile import Cost, Tile

FP32 = (DType.FLOAT32,)


def only_plain(work):
    """Refuses everything that the kernel does not support: plans take it for all other work."""
    options = work.options
    if options.needs_variant or options.has_mask or work.rotates:
        return "it has no masks, soft caps, position encodings and variants"
    return None


KERNEL = AttentionKernel(
    name="cpu_plain",
    header="flashpage/kernels/cpu_plain/kernel.h",
    cpp="flashpage::cpu::plain_attention<Traits>",
    parameters=USUAL.parameters,
    include=Path(__file__).parent / "include",
    accepts=(*dtypes(q=FP32, out=FP32), head_dims(16, 128, 8), only_plain),
    tile=lambda work: Tile(16, 16, 1, 1, 1),
    cost=lambda work, tile: Cost(True, 500.0, 1000.0, 1000.0, 64, 64),
    traits=USUAL.traits,
)
'''
Q_LENS, KV_LENS, PAGE = (3, 1, 40, 0), (17, 200, 40, 5), 4


@pytest.fixture
def cpu_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel's folder, file and row, which comes first in the order of preference."""
    monkeypatch.setattr(manifest, "_used", {})  # a manifest that another test writes does not have this kernel
    header = tmp_path / "include" / "flashpage" / "kernels" / "cpu_plain" / "kernel.h"
    header.parent.mkdir(parents=True)
    header.write_text(HEADER)
    (tmp_path / "cpu_plain.py").write_text(HOME)
    spec = importlib.util.spec_from_file_location("cpu_plain", tmp_path / "cpu_plain.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ATTENTION.insert(0, module.KERNEL)
    yield
    ATTENTION.remove(module.KERNEL)


def planned(**changed: Any) -> flashpage.BatchPrefillWithPagedKVCacheWrapper:
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 22, dtype=torch.uint8))
    pages = torch.tensor([-(-length // PAGE) for length in KV_LENS])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), pages.cumsum(0)]).int()
    last = torch.tensor([(length - 1) % PAGE + 1 for length in KV_LENS], dtype=torch.int32)
    q_indptr = torch.tensor([0, *Q_LENS]).cumsum(0).int()
    indices = torch.randperm(int(indptr[-1]), generator=torch.Generator().manual_seed(1)).int()
    options = {"causal": True, "q_data_type": torch.float32, **changed}
    wrapper.plan(q_indptr, indptr, indices, last, 4, 2, 32, PAGE, **options)
    return wrapper


@pytest.mark.parametrize("window_left", [-1, 7])
def test_a_kernel_is_a_folder_a_file_and_a_row(cpu_plain: None, window_left: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(sum(Q_LENS), 4, 32)
    cache = torch.randn(sum(-(-length // PAGE) for length in KV_LENS), 2, PAGE, 2, 32)
    own = planned(window_left=window_left)
    assert own.last_plan.spec.kernel == "cpu_plain" and own.last_plan.explain().startswith(
        "kernel cpu_plain: the first"
    )
    out, lse = own.run(q, cache, return_lse=True)
    kernel = ATTENTION.pop(0)
    usual = planned(window_left=window_left)
    assert usual.last_plan.spec.kernel == "cpu_attention"
    expected, expected_lse = usual.run(q, cache, return_lse=True)
    ATTENTION.insert(0, kernel)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changed", [{"logits_soft_cap": 30.0}, {"pos_encoding_mode": "ROPE_LLAMA"}], ids=str)
def test_its_rules_say_why_not(cpu_plain: None, changed: dict[str, Any]) -> None:
    plan = planned(**changed).last_plan
    assert plan.spec.kernel == "cpu_attention"
    assert "refused cpu_plain: it has no masks, soft caps, position encodings and variants" in plan.explain()


def test_its_header_is_in_the_key(cpu_plain: None, tmp_path: Path) -> None:
    from flashpage.jit import host_target
    from flashpage.jit.render import include_dirs, render
    from flashpage.jit.source import included, key_of

    spec = planned().last_plan.spec
    assert spec is not None
    assert "flashpage/kernels/cpu_plain/kernel.h" in included(render(spec), include_dirs(spec))
    assert key_of(spec, host_target()) == key_of(spec, host_target())


def test_an_edit_of_its_header_is_seen_by_the_next_process(
    cpu_plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's fingerprint does not cover the kernel's folder, so the key must not be remembered."""
    from flashpage.base import paths
    from flashpage.jit import host_target
    from flashpage.jit.build import obtain
    from flashpage.jit.cache import Store

    monkeypatch.setattr(paths, "is_settled", lambda: True)
    spec, store = planned().last_plan.spec, Store(tmp_path / "store")
    assert spec is not None
    obtain(spec, host_target(), store)
    assert store.find(spec, host_target()) is not None
    with open(tmp_path / "include" / "flashpage" / "kernels" / "cpu_plain" / "kernel.h", "a") as file:
        file.write("// edited\n")
    assert store.recall(spec, host_target()) is None
    assert store.find(spec, host_target()) is None


def test_the_package_knows_its_own_kernels(cpu_plain: None) -> None:
    assert not kernels.is_of_package("cpu_plain")
    assert kernels.is_of_package("cpu_attention") and kernels.is_of_package("merge")


ODD = Device("Imaginary 7", 89, 7, 99 << 10, 100 << 10, 8 << 20, gbps=100.0, tflops=10.0)


def test_a_card_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(devices, "CARDS", (*devices.CARDS, ODD))
    assert cli.main(["plan", "300,17,4096", "--card", "imaginary 7"]) == 0
    out = capsys.readouterr().out
    assert "card: Imaginary 7" in out and "kernel attention_sm80" in out and "floor on Imaginary 7" in out
    plan = plan_lengths(None, [5000] * 3, card=ODD)
    assert plan.num_ctas % ODD.sms == 0
    assert cli.main(["plan", "300", "--card", "imaginary 8"]) == 2
    assert "card 'imaginary 8' is not known: pass one of H200, H100, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("driver_name", "sm", "sms", "row"),
    [
        ("NVIDIA H200", 90, 132, "H200"),
        ("NVIDIA H100 80GB HBM3", 90, 132, "H100"),
        ("NVIDIA H100 PCIe", 90, 114, "H100 PCIe"),
        ("NVIDIA H20", 90, 78, "H20"),
        ("NVIDIA H200 MIG 1g.18gb", 90, 16, "H200"),
        ("NVIDIA A100-SXM4-80GB", 80, 108, "A100"),
        ("NVIDIA GeForce RTX 4090", 89, 128, "RTX 4090"),
        ("NVIDIA L40S", 89, 142, "L40S"),
        ("NVIDIA L4", 89, 58, "L4"),
        ("NVIDIA GB10", 121, 48, "GB10"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, 188, "RTX PRO 6000"),
    ],
)
def test_the_drivers_numbers_replace_a_rows(driver_name: str, sm: int, sms: int, row: str) -> None:
    card = devices.from_driver(_info(driver_name, sm, sms))
    known = devices.named(row)
    assert (card.name, card.sms, card.shared_bytes, card.l2_bytes) == (row, sms, 12345, 77)
    assert not card.is_estimated and card.sm_bytes_per_ns == pytest.approx(known.sm_bytes_per_ns)


def test_a_card_without_a_row_is_estimated_from_its_clocks() -> None:
    card = devices.from_driver(_info("NVIDIA RTX Imaginary", 86, 84))
    assert card.is_estimated and card.name == "NVIDIA RTX Imaginary"
    assert card.gbps == pytest.approx(0.95 * 768.1, rel=0.01)  # 8,001 MHz, 384 bits, two transfers for each clock
    assert card.tflops == pytest.approx(154.8, rel=0.01)  # 84 SMs at 1,800 MHz
    assert devices.from_driver(_info("NVIDIA GeForce RTX Imaginary", 86, 84)).tflops == pytest.approx(77.4, rel=0.01)


def test_a_driver_that_tells_no_clocks() -> None:
    """The memory's rate is that of the nearest row for as many SMs; the products' follows from the usual clock."""
    for khz in (0, 1):
        info = _info("NVIDIA GeForce RTX Imaginary", 89, 24)
        info.clock_khz = info.memory_khz = khz
        card, like = devices.from_driver(info), devices.named("L4")
        assert card.is_estimated and card.sm_bytes_per_ns == pytest.approx(like.sm_bytes_per_ns)
        assert card.tflops == pytest.approx(24 * 512 * 1.5e-3)


def test_a_capability_that_is_not_known() -> None:
    """It has what the one before it has, without kernels that were made for that one."""
    row = devices.capability_of(130)
    assert row.abilities == devices.CAPABILITIES[121].abilities and row.widens_fp8 and not row.is_accelerated
    assert devices.capability_of(75).shared_kib == devices.CAPABILITIES[80].shared_kib


@pytest.mark.parametrize(
    ("name", "abilities"),
    [
        ("A100", ()),
        ("RTX 3090", ()),
        ("L40S", ("fp8 mma",)),
        ("H20", ("fp8 mma", "clusters", "bulk copies", "PDL", "wgmma")),
        ("B200", ("fp8 mma", "clusters", "bulk copies", "PDL")),
        ("GB10", ("fp8 mma", "clusters", "bulk copies", "PDL")),
    ],
)
def test_a_row_says_what_the_card_can_do(name: str, abilities: tuple[str, ...]) -> None:
    assert devices.named(name).abilities == abilities


def test_info_says_whether_a_card_has_a_row() -> None:
    """The fake driver's card has no row in the first call, and has one in the second."""
    with_fake_driver("""
import contextlib, dataclasses, io
from flashpage import cli
from flashpage.kernels import devices

def shown():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(["info"]) == 0
    return out.getvalue()

assert "rates estimated (no row of the table of cards names it): " in shown()
info = host.DeviceInfo()
host.check(lib.fp_cuda_device_info(0, byref(info)))
row = dataclasses.replace(devices.H200, name="Fake", sm=info.sm, sms=2 * info.num_sms)
devices.CARDS = (*devices.CARDS, row)
assert "Fake: 2277 GB/s, 494 TFLOP/s" in shown(), shown()  # half of the rates, for half of the SMs
assert "estimated" not in shown()
""")


def _info(name: str, sm: int, sms: int) -> native.DeviceInfo:
    numbers = {"shared_bytes_per_cta": 12345, "shared_bytes_per_sm": 23456, "l2_bytes": 77}
    clocks = {"clock_khz": 1_800_000, "memory_khz": 8_001_000, "memory_bus_bits": 384}
    return native.DeviceInfo(name=name.encode(), sm=sm, num_sms=sms, **numbers, **clocks)
