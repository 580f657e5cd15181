"""Every tile fits the shared memory of its card: sizes are read from compiled cubins."""

from __future__ import annotations

import functools
import itertools
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
from cubin import Elf

from aot import plans
from flashpage import kernels
from flashpage.base.errors import CapabilityError
from flashpage.jit import Target
from flashpage.jit.compilers import find_compiler
from flashpage.kernels import blocks, decode_sm90, devices, latent_formats
from flashpage.kernels.ahead import BF16, BYTES, E4M3, RAGGED, Ahead, fp8_rows, latent_rows
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.devices import Device
from flashpage.kernels.spec import KernelSpec
from flashpage.variants import render

ONE_OF_A_KIND = {(card.sm, card.shared_bytes): card for card in reversed(devices.CARDS)}.values()
ONE_OF_A_KIND = sorted(ONE_OF_A_KIND, key=lambda card: card.shared_bytes)  # equal sources one after the other

# Plans with hardly room for the fewest slots, and the widest latent rows in each format.
TIGHT = (
    *(Ahead(BF16, BF16, (256, 128), rows, 16) for rows in (32, 64)),
    *(Ahead(BF16, BF16, (512, 256), rows, RAGGED) for rows in (16, 32, 64)),
    *(Ahead(BF16, BYTES, (512, 512), 16, kv_format="bfloat16", v_format=name) for name in ("int8_token", "nvfp4")),
    *latent_rows(16, 32, 64),
    *(
        fp8_rows(name, rows, source)
        for name, rows, source in itertools.product(
            (latent_formats.SCALED, *latent_formats.PACKED), (16, 32, 64), ("latent", "selected")
        )
    ),
)


def specs_of(card: Device, step: int, first: int = 0) -> list[KernelSpec]:
    """One spec for each combination of tile, types and sizes that plans choose on the card, of every `step`-th head
    dims, types and kind from `first` on, and of every `step`-th plan of K and V in formats and of latent rows."""
    found: dict[object, KernelSpec] = {}
    has_contexts = card.sm == 90  # only prefill_sm90 tells them apart
    for row in (*TIGHT, *plans.every(step, first, has_contexts)):
        try:
            spec = choose_for_card(row.problem, card, row.variant).spec
        except CapabilityError:
            continue  # plan refuses it, with reasons
        types = spec.q_dtype, spec.kv_dtype, spec.formats, spec.latent_format
        sizes = spec.head_dim_qk, spec.head_dim_vo
        key = (spec.kernel, spec.tile, spec.loader, *types, *sizes, spec.mask_source, spec.position_encoding)
        found.setdefault(key, spec)
    for dim, stored, group in itertools.product(range(32, 257, 8), (BF16, E4M3), (4, 40)):
        spec = blocks.decode_spec(BF16, stored, dim, group, card)
        found[spec] = spec
    return list(found.values())


def source_of(specs: list[KernelSpec]) -> str:
    """A source with the launch numbers of all kernels and the code of none."""
    known = {spec.kernel: kernels.find(spec.kernel) for spec in specs}
    text = [f'#include "{kernel.header}"' for kernel in known.values()] + ['#include "flashpage/params/variant.h"']
    text += [f'#include "{header}"' for header in {h: None for spec in specs for h in spec.format_headers}]
    if decode_sm90.KERNEL.name in known:
        text.append(f"static_assert(flashpage::decode_ring_bytes == {decode_sm90.RING_BYTES});")
    for number, spec in enumerate(specs):
        kernel = known[spec.kernel]
        traits = "\n".join(kernel.traits(spec)).replace("= flashpage::Variant;", f"= k{number}::Variant;")
        for name in ("KeyProduct", "HeldKeyProduct", "ShortKeyProduct", "TailProduct", "ValueProduct"):
            traits = traits.replace(f"flashpage::{name}", f"k{number}::{name}")
        sources = f"{render(spec.variant)}\n{kernel.sources(spec)}"
        text.append(f"namespace flashpage::k{number} {{\n{sources}\nstruct Traits {{\n{traits}\n}};")
        text.append(f"using Kernel = {kernel.cpp};")
        text.append(
            f'extern "C" __device__ const int launch_{number}[2] = {{Kernel::threads, Kernel::shared_bytes}};\n}}'
        )
    return "\n".join(text)


@functools.cache
def sizes_of(source: str, sm: int) -> dict[int, int]:
    """Bytes of shared memory by the number of the spec."""
    target = Target("cuda", sm)
    compiler = find_compiler(target)
    if compiler is None:
        pytest.skip("no CUDA compiler here")
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        text.write_text(source)
        done = subprocess.run(compiler.command(text, binary, target), capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        elf = Elf(binary.read_bytes())
    launches = {s.name: struct.unpack("<2i", elf.bytes_of(s)) for s in elf.symbols if s.name.startswith("launch_")}
    return {int(name.removeprefix("launch_")): size for name, (_, size) in launches.items()}


@pytest.mark.parametrize("card", ONE_OF_A_KIND, ids=lambda card: f"sm_{card.sm}-{card.name}")
def test_tiles_fit(card: Device, request: pytest.FixtureRequest) -> None:
    """One in 31 combinations: each head dim has two or three pairs of types and kinds; with --half 1 others."""
    specs = specs_of(card, 31, first=15 if request.config.getoption("half") else 0)
    sizes = sizes_of(source_of(specs), 90 if card.sm == 90 else 80)  # one compile for all cards with these specs
    assert len(sizes) == len(specs) > 100
    too_large = {specs[number].name: size for number, size in sizes.items() if size > card.shared_bytes}
    assert not too_large, (len(too_large), too_large)
    alone = [(specs[i].name, size) for i, size in sizes.items() if not _fits_as_often_as_planned(specs[i], size, card)]
    assert not alone, (len(alone), alone)


def _fits_as_often_as_planned(spec: KernelSpec, size: int, card: Device) -> bool:
    """Whether an SM has room for the CTAs from which registers and costs follow: usual kernels of cards whose tiles are
    chosen for two CTAs an SM."""
    is_usual = (
        card.shared_bytes < 200 << 10
        and spec.kernel == "attention_sm80"
        and spec.position_encoding == "none"
        and not spec.is_latent
    )
    has_usual_dims = spec.head_dim_qk == spec.head_dim_vo and spec.head_dim_qk in (64, 80, 96, 128)
    has_one_stage = (spec.tile.tile_q, spec.tile.stages) == (16, 1)
    if not is_usual or not (has_usual_dims or has_one_stage):
        return True
    return spec.tile.ctas_per_sm * (size + 1024) <= card.sm_shared_bytes
