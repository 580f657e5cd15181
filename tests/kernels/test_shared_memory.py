"""Every tile fits the shared memory of its card: sizes are read from compiled cubins."""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
from cubin import Elf

from flashpage import kernels
from flashpage.base.dtypes import DType
from flashpage.base.errors import CapabilityError
from flashpage.jit import Target
from flashpage.jit.compilers import find_compiler
from flashpage.kernels import blocks, decode_sm90, devices, latent_formats
from flashpage.kernels.ahead import RAGGED
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.context_classes import ContextClass
from flashpage.kernels.devices import Device
from flashpage.kernels.options import Options
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.work import Problem
from flashpage.variants import render
from flashpage.variants.spec import VariantSpec

BF16, E4M3 = DType.BFLOAT16, DType.FLOAT8_E4M3
ONE_OF_A_KIND = {(card.sm, card.shared_bytes): card for card in reversed(devices.CARDS)}.values()
ONE_OF_A_KIND = sorted(ONE_OF_A_KIND, key=lambda card: card.shared_bytes)  # equal sources one after the other
HEAD_DIMS = ((16, 16), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (464, 464), (512, 512))
HEAD_DIMS += ((512, 64), (512, 128), (512, 256), (464, 72), (64, 256), (256, 64), (16, 512), (320, 192))
# Head dims with rotated keys next to the ring: rows that do not divide into it, and keys much wider than values.
HEAD_DIMS += ((40, 40), (48, 48), (72, 72), (24, 48), (56, 16), (96, 32), (112, 16), (72, 48), (200, 48), (216, 32))
ROWS = (16, 32, 64, 128)
DTYPES = ((BF16, BF16), (BF16, E4M3), (E4M3, E4M3))
LOADS = VariantSpec(logit="score + bias(kv_idx)", tensors=(("bias", "float32", 1),))
MASKS = VariantSpec(mask="kv_idx < 7 * h")
# Options and variants that need shared memory or registers.
KINDS = {
    "plain": ({}, VariantSpec()),
    "bits": ({"has_mask": True}, VariantSpec()),
    "function": ({}, MASKS),
    "rope": ({"position_encoding": "ROPE_LLAMA"}, VariantSpec()),
    "cap": ({}, VariantSpec(logit="2.0f * tanh(score / 2.0f)")),
    "loads": ({}, LOADS),
    "rope and bits": ({"has_mask": True, "position_encoding": "ROPE_LLAMA"}, VariantSpec()),
}


def specs_of(card: Device, step: int, first: int = 0) -> list[KernelSpec]:
    """One spec for each combination of tile, types and sizes that plans choose on the card, of every `step`-th head
    dims, types and kind from `first` on."""
    found: dict[object, KernelSpec] = {}
    classes = ContextClass if card.sm == 90 else (ContextClass.USUAL,)  # only prefill_sm90 tells them apart
    sample = itertools.islice(itertools.product(HEAD_DIMS, DTYPES, KINDS.values()), first, None, step)
    combinations = itertools.product(sample, ROWS, (RAGGED, 1, 16), classes)
    for ((qk, vo), (query, stored), (changed, variant)), rows, page_size, contexts in combinations:
        options = Options(
            "ragged" if page_size == RAGGED else "paged", 8, 8, qk, vo, page_size, query, stored, BF16, **changed
        )
        try:
            spec = choose_for_card(Problem(options, rows, contexts=contexts), card, variant).spec
        except CapabilityError:
            continue  # plan refuses it, with reasons
        key = (spec.kernel, spec.tile, spec.loader, query, stored, qk, vo, spec.mask_source, spec.position_encoding)
        found.setdefault(key, spec)
    pairs = (("nvfp4", "nvfp4"), ("int8_token", "int8_token"), ("int4_token", "float8_e4m3fn"), ("bfloat16", "nvfp4"))
    for (k, v), dim, rows, page_size in itertools.product(pairs, (64, 128, 256), ROWS, (1, 16)):
        options = Options("paged", 8, 8, dim, dim, page_size, BF16, DType.BYTES, BF16, k_format=k, v_format=v)
        with contextlib.suppress(CapabilityError):
            spec = choose_for_card(Problem(options, rows), card).spec
            found[spec] = spec
    for name, rows in itertools.product(("plain", "scaled", *latent_formats.PACKED), (16, 32, 64)):
        stored, columns = BF16 if name == "plain" else E4M3, 512 if name == "deepseek_v4" else 576
        options = Options("latent", 16, 1, columns, 512, 16, BF16, stored, BF16, latent_format=name)
        spec = choose_for_card(Problem(options, rows), card).spec
        found[spec] = spec
    for dim, stored, group in itertools.product((32, 64, 80, 96, 112, 120, 128, 192, 256), (BF16, E4M3), (4, 40)):
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
        for name in ("KeyProduct", "ShortKeyProduct", "ValueProduct"):
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
    """One in 10 combinations: each head dim has one or two pairs of types and kinds. With --half 1 others: in both
    together each head dim has each pair of types, and four or five of the seven kinds."""
    specs = specs_of(card, 10, first=5 if request.config.getoption("half") else 0)
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
    if not is_usual or spec.head_dim_qk != spec.head_dim_vo or spec.head_dim_qk not in (64, 80, 96, 128):
        return True
    return spec.tile.ctas_per_sm * (size + 1024) <= card.sm_shared_bytes
