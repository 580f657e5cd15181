"""KernelSpec: the identity of one compiled kernel. Its fields give name, hash, template context and AOT entry."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import Any

from ..base.dtypes import DType
from ..variants.spec import VariantSpec
from . import json_records, kv_formats, latent_formats
from .tile import Tile


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """Everything that is compiled in, but nothing that changes from batch to batch (lengths, head counts, page
    size)."""

    kernel: str  # Kernel.name: cpu_attention, decode_sm90, merge, ...
    q_dtype: DType = DType.BFLOAT16
    kv_dtype: DType = DType.BFLOAT16
    out_dtype: DType = DType.BFLOAT16
    head_dim_qk: int = 0
    head_dim_vo: int = 0
    kv_source: str = "paged"  # Options.kv_source
    latent_format: str = latent_formats.PLAIN  # latent rows: LatentFormat of include/flashpage/common/types.h
    k_format: str = kv_formats.PLAIN  # Options.k_format
    v_format: str = kv_formats.PLAIN
    # implicit (causal and window at run time) | packed_bits | function (the variant's; evaluated for each tile before
    # the run)
    mask_source: str = "implicit"
    position_encoding: str = "none"  # none | rope
    tile: Tile | None = None
    variant: VariantSpec = VariantSpec()
    loader: str = ""  # boxes (K and V by tensor maps) | rows | converted, transposed, columns (fp8); empty: only one
    trace: bool = False  # clock stamps go to AttentionParams::trace

    @property
    def backend(self) -> str:
        return "cpu" if self.kernel.startswith("cpu_") else "cuda"

    @property
    def is_latent(self) -> bool:
        return self.kv_source in latent_formats.SOURCES

    @property
    def formats(self) -> tuple[kv_formats.KvFormat, kv_formats.KvFormat]:
        """How K and V are stored."""
        return kv_formats.find(self.k_format, self.kv_dtype), kv_formats.find(self.v_format, self.kv_dtype)

    @property
    def has_formats(self) -> bool:
        """Options.has_formats"""
        return self.k_format != kv_formats.PLAIN

    @property
    def format_headers(self) -> list[str]:
        """The headers of its formats."""
        return sorted({f"flashpage/formats/{side.header}.h" for side in self.formats}) if self.has_formats else []

    @property
    def ctas(self) -> int:
        """CTAs of a cluster, which a plan counts as one CTA."""
        return 1 if self.tile is None else self.tile.ctas

    @property
    def rows(self) -> int:
        """Packed rows of the tile."""
        return 0 if self.tile is None else self.tile.tile_q

    @property
    def entry(self) -> str:
        """The extern "C" symbol."""
        return f"flashpage_{self.kernel}"

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Computed once: `plan` looks its kernels up by spec, and hashing the nested fields each time would take 0.7
        us."""
        return int(self.digest[:15], 16)

    @functools.cached_property
    def name(self) -> str:
        """A readable and unique name, which messages, the cache and ptxas reports show."""
        parts = [self.kernel]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "kernel" or value == field.default:
                continue
            parts.append(_short(field.name, value))
        return "-".join(parts) + "-" + self.digest[:8]

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the canonical JSON of the fields."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self, dict_factory=_plain_dict)

    @staticmethod
    def from_json(data: Any, place: str = "spec") -> KernelSpec:
        """The spec of to_json, whose fields may be left out if they have their defaults. ValueError, which begins with
        `place`, where a field is not what the spec may hold."""
        return KernelSpec(**json_records.record(place, data, _FIELDS, frozenset({"kernel"})))


def _dtype(place: str, value: Any) -> DType:
    return DType(_DTYPE(place, value))


def _tile(place: str, value: Any) -> Tile | None:
    return None if value is None else Tile(**json_records.record(place, value, _TILE, _TILE_NEEDS))


def _variant(place: str, value: Any) -> VariantSpec:
    return VariantSpec(**json_records.record(place, value, _VARIANT))


_DTYPE = json_records.choice(*(dtype.value for dtype in DType))
_HEAD_DIM = json_records.number(0, 1024)
_TILE = {field.name: json_records.number(1, 4096) for field in dataclasses.fields(Tile)}
_TILE |= dict.fromkeys(("ring_bytes", "shared_limit"), json_records.number(0, 1 << 24))
_TILE_NEEDS = frozenset(field.name for field in dataclasses.fields(Tile) if field.default is dataclasses.MISSING)
_VARIANT = {
    "logit": json_records.source,
    "mask": json_records.source,
    "tensors": json_records.TENSORS,
    "scalars": json_records.SCALARS,
}
_FIELDS: dict[str, json_records.Judge] = {
    "kernel": json_records.kernel_name,
    "q_dtype": _dtype,
    "kv_dtype": _dtype,
    "out_dtype": _dtype,
    "head_dim_qk": _HEAD_DIM,
    "head_dim_vo": _HEAD_DIM,
    "kv_source": json_records.choice("paged", "ragged", *latent_formats.SOURCES),
    "latent_format": json_records.choice(latent_formats.PLAIN, latent_formats.SCALED, *latent_formats.PACKED),
    "k_format": json_records.choice(*kv_formats.NAMES),
    "v_format": json_records.choice(*kv_formats.NAMES),
    "mask_source": json_records.choice("implicit", "packed_bits", "function"),
    "position_encoding": json_records.choice("none", "rope"),
    "tile": _tile,
    "variant": _variant,
    "loader": json_records.choice("", "boxes", "rows", "converted", "transposed", "columns", "blocks"),
    "trace": json_records.flag,
}


def _plain_dict(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, DType) else value for key, value in items}


def _short(field: str, value: Any) -> str:
    if isinstance(value, DType):
        short = value.value.removeprefix("float8_").removesuffix("fn")
        return f"{field.split('_')[0]}_{short}"
    if isinstance(value, Tile):
        return f"t{value.tile_q}x{value.tile_kv}"
    if isinstance(value, VariantSpec):
        return "variant"
    if isinstance(value, bool):
        return field
    if field.startswith("head_dim"):
        return f"{field[-2:]}{value}"
    return str(value)
