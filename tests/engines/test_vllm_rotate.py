"""RoPE of new queries and keys with the write of keys and values, which vLLM's fusion pass calls in place of two."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
import torch
from native_build import shared_library

from flashpage import RunError
from flashpage.engines.vllm import cache_layout, rotate
from flashpage.engines.vllm.rotate import Rotation, Slots, rotate_and_write
from flashpage.engines.vllm.write import Write

SOURCES = {torch.bfloat16: "Bf16", torch.float16: "Half", torch.float32: "float"}


@dataclasses.dataclass(frozen=True)
class Form:
    """Rows of a step, all of which are slices of one tensor, as vLLM's are."""

    dtype: torch.dtype = torch.bfloat16
    heads: tuple[int, int] = (6, 2)
    size: int = 64
    rotary: int = 64
    is_neox: bool = True
    table: torch.dtype | None = None  # None: of the rows' type
    kv_type: str = "auto"
    page: int = 16


FORMS = {
    "usual": Form(),
    "pairs of neighbours": Form(is_neox=False),
    "a part of each row, fp32 angles": Form(size=96, rotary=32, table=torch.float32, dtype=torch.float16),
    "neighbours in a part of each row": Form(size=128, rotary=64, is_neox=False, heads=(5, 1)),
    "no whole vectors": Form(size=40, rotary=20, page=7),
    "no whole vectors, neighbours": Form(size=24, rotary=12, is_neox=False, page=1, heads=(3, 3)),
    "fp32": Form(dtype=torch.float32, size=32, rotary=32),
    "e4m3": Form(kv_type="fp8", size=80, rotary=80),
    "e4m3, no whole vectors": Form(kv_type="fp8", size=48, rotary=24, is_neox=False),
}
TOKENS, SLOTS, BLOCKS, PLACES = 11, 8, 5, 50


class Scene:
    """The tensors of one call, and the exact results."""

    def __init__(self, form: Form, device: str) -> None:
        self.form, drawn = form, torch.Generator().manual_seed(1)
        heads, kv_heads = form.heads
        qkv = torch.randn(TOKENS, (heads + 2 * kv_heads) * form.size, generator=drawn).to(device, form.dtype)
        parts = qkv.split([heads * form.size, kv_heads * form.size, kv_heads * form.size], dim=1)
        self.given = [part.clone().view(TOKENS, -1, form.size) for part in parts]
        self.query, self.key, self.value = (part.view(TOKENS, -1, form.size) for part in parts)
        self.positions = torch.randint(PLACES, (TOKENS,), generator=drawn).to(device)
        angles = torch.rand(PLACES, form.rotary // 2, generator=drawn) * 6
        self.table = torch.cat([angles.cos(), angles.sin()], dim=1).to(device, form.table or form.dtype)
        stored = cache_layout.FP8.get(form.kv_type, form.dtype)
        held = torch.zeros(BLOCKS, form.page, kv_heads, 2 * form.size, device=device).to(stored)
        self.caches = held[..., : form.size], held[..., form.size :]
        self.slots = torch.randperm(BLOCKS * form.page, generator=drawn)[:SLOTS]
        self.slots = torch.cat([self.slots, self.slots.new_full((max(0, SLOTS - len(self.slots)),), -1)]).to(device)
        self.slots[2] = -1
        self.scales = tuple(torch.tensor(scale, device=device) for scale in (0.5, 2.0))

    def arguments(self) -> tuple[Any, ...]:
        rotation = Rotation(self.positions, self.table, self.form.is_neox)
        slots = Slots(self.caches, self.slots, self.form.kv_type, self.scales)
        return self.query, self.key, self.value, rotation, slots

    def rotated(self, rows: torch.Tensor) -> torch.Tensor:
        """Exact, [rows, heads, size] fp64: pairs are complex numbers."""
        form, rows = self.form, rows.cpu().double()
        cosines, sines = self.table.cpu().double()[self.positions.cpu()].unsqueeze(1).chunk(2, dim=2)
        half = form.rotary // 2
        places = torch.arange(form.rotary).view(2, half) if form.is_neox else torch.arange(form.rotary).view(half, 2).T
        turned = torch.complex(rows[..., places[0]], rows[..., places[1]]) * torch.complex(cosines, sines)
        found = rows.clone()
        found[..., places[0]], found[..., places[1]] = turned.real, turned.imag
        return found

    def check(self) -> None:
        limit = 2 * torch.finfo(self.form.dtype).eps
        for found, given in ((self.query, self.given[0]), (self.key, self.given[1])):
            difference = found.cpu().double() - self.rotated(given)
            assert difference.abs().max() < limit * given.abs().max(), difference.abs().max()
        assert torch.equal(self.value, self.given[2])
        kept = [(token, int(slot)) for token, slot in enumerate(self.slots) if slot >= 0]
        is_written = torch.zeros(BLOCKS * self.form.page, dtype=torch.bool)
        is_written[[slot for _, slot in kept]] = True
        for cache, rows, scale in zip(self.caches, (self.key, self.value), self.scales, strict=True):
            cells = cache.float().flatten(0, 1)
            assert bool((cells[~is_written] == 0).all())
            for token, slot in kept:  # what is stored has the rounding of the rotated rows
                expected = rows[token]
                if self.form.kv_type != "auto":
                    expected = (expected.float() / scale).to(cache.dtype)
                assert torch.equal(cells[slot], expected.float())


@pytest.mark.parametrize("name", FORMS)
def test_rows_and_cache(name: str, device: str) -> None:
    scene = Scene(FORMS[name], device)
    rotate_and_write(*scene.arguments())
    scene.check()


@pytest.mark.parametrize("name", [name for name in FORMS if name != "fp32"])
def test_the_kernel_on_the_host(name: str) -> None:
    """With fewer CTAs than rows, and more."""
    form = FORMS[name]
    stored = "E4m3" if form.kv_type == "fp8" else SOURCES[form.dtype]
    flags = (f"-DSOURCE={SOURCES[form.dtype]}", f"-DCACHE={stored}")
    library = ctypes.CDLL(str(shared_library("rotate_write.cpp", first_include="hopper", flags=flags)))
    for grid in (2, 100):
        scene = Scene(form, "cpu")
        query, key, value, rotation, slots = scene.arguments()
        write = Write("rows", key, value, *slots.caches, slots.kv_cache_dtype)
        write.fill((key, value), slots.caches, slots.mapping, slots.scales)
        params = rotate.parameters(query, rotation)
        params.write, params.num_rows = write.params, TOKENS
        params.query, params.positions = query.data_ptr(), rotation.positions.data_ptr()
        params.cos_sin = rotation.cos_sin.data_ptr()
        library.rotate_write(ctypes.byref(params), grid)
        scene.check()


def test_errors() -> None:
    for change, says in (
        ({"query": lambda t: t[:4]}, "query has shape .* Pass rows of equal numbers"),
        ({"query": lambda t: t.float()}, "query has shape .* and dtype torch.float32"),
        ({"positions": lambda t: t[:4]}, r"positions has shape \(4,\) .*: pass \[11\] int64"),
        ({"positions": lambda t: t.int()}, "positions has shape .* and dtype torch.int32"),
        ({"table": lambda t: t[:, :63]}, r"cos_sin_cache has shape \(50, 63\)"),
        ({"table": lambda t: torch.cat([t, t], dim=1)}, "rotary_dim even and at most 64"),
        ({"slots": lambda t: t + 1000}, "slot_mapping reaches"),
    ):
        scene = Scene(Form(), "cpu")
        for name, function in change.items():
            setattr(scene, name, function(getattr(scene, name)))
        with pytest.raises(RunError, match=says):
            rotate_and_write(*scene.arguments())
