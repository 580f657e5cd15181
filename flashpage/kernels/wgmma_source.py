"""The C++ source of a kernel's warpgroup products (wgmma). An instruction names each of its registers, whose number
depends on the columns, which no C++ template can express."""

from __future__ import annotations

from ..base.dtypes import DType
from ..variants.spec import VariantSpec
from . import latent_formats
from .spec import KernelSpec

_TYPES = {DType.BFLOAT16: "bf16", DType.FLOAT16: "f16", DType.FLOAT8_E4M3: "e4m3"}


def product_dtype(spec: KernelSpec) -> DType:
    """The type of the factors; fp16 if the kernel converts fp8 K and V, because it holds every fp8 number. Latent rows
    are converted to the type of the queries, but for latent_e4m3_sm90, whose products have types of their own."""
    if spec.loader in ("transposed", "columns"):
        return spec.kv_dtype
    return spec.kv_dtype.widened if spec.kv_dtype.is_fp8 and not spec.is_latent else spec.q_dtype


def render(spec: KernelSpec) -> str:
    """Renders KeyProduct (scores of a tile), ShortKeyProduct (scores of a unit's short last tile) and ValueProduct
    (values)."""
    assert spec.tile is not None
    product = product_dtype(spec)
    kind = _TYPES[product]
    keys = _product("KeyProduct", spec.tile.tile_kv, kind, a_in_registers=False, b_by_columns=False)
    short = short_tokens(spec)
    short_keys = (
        _product("ShortKeyProduct", short, kind, a_in_registers=False, b_by_columns=False)
        if short > 0
        else "struct ShortKeyProduct {\n  static constexpr int columns = 0;\n};"
    )
    by_columns = not product.is_fp8  # 8-bit factors must have the sum's terms in their rows
    values = _product(
        "ValueProduct", -(-spec.head_dim_vo // 16) * 16, kind, a_in_registers=True, b_by_columns=by_columns
    )
    return f"{keys}\n\n{short_keys}\n\n{values}"


def render_transposed(spec: KernelSpec) -> str:
    """Renders KeyProduct (transposed scores: keys times rows of q) and ValueProduct (transposed values: columns of V
    times rows of probabilities), both with a warpgroup's packed rows as columns."""
    assert spec.tile is not None
    kind = _TYPES[product_dtype(spec)]
    rows = spec.tile.tile_q // spec.tile.warps_q
    keys = _product("KeyProduct", rows, kind, a_in_registers=False, b_by_columns=False)
    values = _product("ValueProduct", rows, kind, a_in_registers=False, b_by_columns=False, a_by_columns=True)
    return f"{keys}\n\n{values}"


def render_parts(spec: KernelSpec, value_columns: int) -> str:
    """Renders KeyProduct (scores of a block of tokens) and ValueProduct (`value_columns` of the value columns)."""
    assert spec.tile is not None
    kind = _TYPES[product_dtype(spec)]
    keys = _product("KeyProduct", spec.tile.tile_kv, kind, a_in_registers=False, b_by_columns=False)
    values = _product("ValueProduct", value_columns, kind, a_in_registers=True, b_by_columns=True)
    return f"{keys}\n\n{values}"


def render_e4m3(spec: KernelSpec) -> str:
    """Renders KeyProduct (scores in e4m3: 64 rows times tokens or, if a unit has fewer rows, tokens times both terms of
    the rows), TailProduct (those of the tail) and ValueProduct (columns of V in fp16 times rows of probabilities)."""
    assert spec.tile is not None
    tokens, rows = spec.tile.tile_kv, spec.tile.tile_q
    columns = 2 * rows if rows < tokens else tokens
    kind = "e4m3" if spec.latent_format == latent_formats.SCALED else _TYPES[spec.q_dtype]
    keys = _product("KeyProduct", columns, "e4m3", a_in_registers=False, b_by_columns=False)
    tail = _product("TailProduct", rows, kind, a_in_registers=False, b_by_columns=False)  # 64 rows: as many as tokens
    values = _product("ValueProduct", rows, "f16", a_in_registers=True, b_by_columns=False)
    return f"{keys}\n\n{tail}\n\n{values}"


def render_held_keys(spec: KernelSpec) -> str:
    """Renders HeldKeyProduct: KeyProduct with the queries in registers."""
    assert spec.tile is not None
    kind = _TYPES[product_dtype(spec)]
    return _product("HeldKeyProduct", spec.tile.tile_kv, kind, a_in_registers=True, b_by_columns=False)


def short_tokens(spec: KernelSpec) -> int:
    """Tokens of the short tile with which a unit may end: half of a whole tile, in steps of 16. 0: there is none.

    Tiles of a mask are not known to be a unit's last ones. Kernels with three warpgroups, RoPE or a variant's code have
    no registers for it.
    """
    assert spec.tile is not None
    plain = spec.mask_source == "implicit" and spec.position_encoding == "none" and spec.variant == VariantSpec()
    has_room = (
        spec.loader == "boxes"
        and spec.tile.tile_q == 128 * spec.tile.ctas
        and spec.tile.tile_kv >= 80
        and spec.head_dim_vo >= 128
    )
    return -(-spec.tile.tile_kv // 32) * 16 if plain and has_room else 0


def _product(
    name: str, columns: int, kind: str, *, a_in_registers: bool, b_by_columns: bool, a_by_columns: bool = False
) -> str:
    """c += a b for 64 rows and 32 bytes of the sum's terms. `a_by_columns`, `b_by_columns`: rows of the matrix in
    shared memory are the terms."""
    sums = columns // 2
    a = [f"a[{i}]" for i in range(4)] if a_in_registers else ["a"]
    b, accumulate = sums + len(a), sums + len(a) + 1
    registers = ", ".join(f"%{sums + i}" for i in range(len(a)))
    transposed = "" if a_in_registers else f", {int(a_by_columns)}"
    transposed = "" if kind == "e4m3" else f"{transposed}, {int(b_by_columns)}"
    steps = 32 if kind == "e4m3" else 16
    accumulators = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+f"(c[{i // 4}][{i % 4}])' for i in range(sums))
    inputs = ", ".join(f'"{"r" if a_in_registers else "l"}"({value})' for value in a)
    return f"""struct {name} {{
  static constexpr int columns = {columns};
  template <int tiles>  // of eight columns; columns after those of the product stay unchanged
  FP_DEVICE static void multiply(float (&c)[tiles][4], {"const u32 (&a)[4]" if a_in_registers else "u64 a"}, u64 b,
                                 bool accumulate) {{
    static_assert(tiles * 8 >= columns);
    asm volatile(
        "{{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, %{accumulate}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k{steps}.f32.{kind}.{kind} {{{accumulators}}}, "
        "{"{" + registers + "}" if a_in_registers else registers}, %{b}, accumulate, 1, 1{transposed};\\n}}"
        : {outputs}
        : {inputs}, "l"(b), "r"(static_cast<int>(accumulate)));
  }}
}};"""
