"""Plans that users may make, as axes of fields of Ahead: checks take some of their combinations."""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flashpage.base.dtypes import DType
from flashpage.kernels import latent_formats
from flashpage.kernels.ahead import BF16, BYTES, E4M3, ONE_TOKEN, RAGGED, Ahead
from flashpage.kernels.context_classes import CLASSES
from flashpage.variants.spec import VariantSpec

Fields = dict[str, Any]
Axis = Sequence[Fields]


def _axis(name: str, values: Iterable[Any]) -> Axis:
    return tuple({name: value} for value in values)


_EQUAL = (16, 32, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256, 320, 384, 464, 512)
_UNEQUAL = ((192, 128), (96, 64), (128, 64), (64, 128), (128, 256), (256, 128), (64, 256), (256, 64), (256, 512))
_FAR = ((512, 64), (512, 128), (512, 256), (464, 72), (16, 512), (320, 192))
# Head dims with rotated keys next to the ring: rows that do not divide into it, and keys much wider than values.
_ROTATED = ((40, 40), (48, 48), (24, 48), (56, 16), (96, 32), (112, 16), (72, 48), (200, 48), (216, 32))
HEAD_DIMS = _axis("head_dims", (*((dim, dim) for dim in _EQUAL), *_UNEQUAL, *_FAR, *_ROTATED))
TYPES: Axis = (
    {"q_dtype": BF16, "kv_dtype": BF16},
    {"q_dtype": BF16, "kv_dtype": E4M3},
    {"q_dtype": E4M3, "kv_dtype": E4M3},
    {"q_dtype": E4M3, "kv_dtype": E4M3, "out_dtype": E4M3},
    {"q_dtype": BF16, "kv_dtype": DType.FLOAT8_E5M2},
)
ALIBI = VariantSpec("score + slopes(h) * to_float(kv_idx - q_idx)", tensors=(("slopes", "float32", 1),))
_LOADS = VariantSpec("score + bias(kv_idx)", tensors=(("bias", "float32", 1),))
_OF_HEAD = VariantSpec(mask="kv_idx < 7 * h")
_DOCUMENTS = VariantSpec(mask="document(b, kv_idx) == document(b, q_idx)", tensors=(("document", "int32", 2),))
# Options that need shared memory or registers.
KINDS: Axis = (
    {},
    {"has_mask": True},
    {"user": _OF_HEAD},
    {"rotates": True},
    {"has_soft_cap": True},
    {"user": _LOADS},
    {"has_mask": True, "rotates": True},
    {"user": _DOCUMENTS},
    {"user": _DOCUMENTS, "has_known_lengths": False},
    {"user": _DOCUMENTS, "has_soft_cap": True},
    {"user": _DOCUMENTS, "rotates": True},
    {"user": ALIBI},
    {"user": ALIBI, "has_mask": True},
    {"user": _LOADS, "has_mask": True},
    {"has_soft_cap": True, "has_mask": True},
    {"has_soft_cap": True, "rotates": True},
)
_ROWS = _axis("packed_rows", (8, 16, 32, 64, 128, 256))
_PAGES = _axis("page_size", (RAGGED, ONE_TOKEN, 16))
_CONTEXTS = _axis("contexts", CLASSES)
_ELEMENTS = (HEAD_DIMS, TYPES, KINDS, _ROWS, _PAGES, _axis("kv_heads", (1, 8)), _CONTEXTS)

_Q_OF_BYTES = tuple({"q_dtype": dtype, "kv_dtype": BYTES} for dtype in (BF16, E4M3))
_FORMATS = (
    *(("nvfp4", "nvfp4"), ("e4m3_token", "e4m3_token"), ("int8_token", "int8_token"), ("int4_token", "int4_token")),
    *(("int4_token", "float8_e4m3fn"), ("float8_e4m3fn", "nvfp4"), ("bfloat16", "nvfp4"), ("int8_token", "bfloat16")),
    ("nvfp4", "int8_token"),
)
FORMATS: Axis = tuple({"kv_format": k, "v_format": v} for k, v in _FORMATS)
_WHOLE_DIMS = _axis("head_dims", ((dim, dim) for dim in (32, 64, 80, 96, 128, 192, 256, 512)))

_COLUMNS = ((128, 64), (256, 192), (320, 256), (448, 384), (512, 512), (576, 512))  # of latent rows, and of their V
_LATENT_ROWS: Axis = (
    *({"kv_dtype": BF16, "head_dims": dims} for dims in _COLUMNS),
    *({"kv_dtype": E4M3, "latent_format": latent_formats.SCALED, "head_dims": dims} for dims in _COLUMNS),
    *(
        {"kv_dtype": E4M3, "latent_format": name, "head_dims": (sum(row.head_dims), row.head_dims[0])}
        for name, row in latent_formats.PACKED.items()
    ),
)
_SOURCES = _axis("kv_source", ("latent", "selected"))

_IN_FORMATS = (_WHOLE_DIMS, _Q_OF_BYTES, FORMATS, KINDS, _ROWS, _PAGES[1:])
_LATENT = (_axis("q_dtype", (BF16,)), _LATENT_ROWS, KINDS, _ROWS, _SOURCES, _axis("page_size", (ONE_TOKEN, 64)))
_TWO_CACHES = (
    _axis("q_dtype", (BF16,)),
    ({"kv_dtype": E4M3, "latent_format": "deepseek_v4", "head_dims": (512, 512), "kv_source": "two_lists"},),
    *(KINDS, _ROWS, _axis("page_size", (64,))),
)
FAMILIES = (_ELEMENTS, _ELEMENTS, _IN_FORMATS, _LATENT, _TWO_CACHES)  # the first twice, as it has the most plans


def every(step: int, first: int = 0, has_contexts: bool = True) -> Iterator[Ahead]:
    """Of every `step`-th head dims, types and kind, all plans; and every `step`-th plan of formats and of latent rows.
    `has_contexts`: in each class of contexts."""
    some = itertools.islice(_combined(*_ELEMENTS[:3]), first, None, step)
    others = _ELEMENTS[3:] if has_contexts else _ELEMENTS[3:-1]
    for fields, rest in itertools.product(some, _combined(*others)):
        yield Ahead(**fields, **rest)
    for family in (_IN_FORMATS, _LATENT, _TWO_CACHES):
        for fields in itertools.islice(_combined(*family), first, None, step):
            yield Ahead(**fields)


def _combined(*axes: Axis) -> Iterator[Fields]:
    for values in itertools.product(*axes):
        yield functools.reduce(operator.or_, values)


def drawn(lot: random.Random) -> Ahead:
    """A plan with a value of each axis, of any family. Kernels may refuse it."""
    return Ahead(**functools.reduce(operator.or_, (lot.choice(axis) for axis in lot.choice(FAMILIES))))
