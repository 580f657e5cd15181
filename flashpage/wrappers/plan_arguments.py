"""Arguments of plan other than lengths, one list for each signature, and the options made of them."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, TypeAlias

from ..base import checks
from ..base.errors import PlanError
from ..base.warn import warn
from ..kernels import kv_formats
from ..kernels.latent_formats import check_format, has_two_caches
from ..kernels.options import Options, RunOptions, check_options, check_rope, check_scale, check_soft_cap, check_window
from ..plan.session import Planner

# Arguments that FlashInfer once took by position after page_size, in this order.
_DEPRECATED_POSITIONS = (
    *("pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type", "data_type"),
    *("sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens", "fixed_split_size"),
    *("disable_split_kv", "q_len_per_req"),
)


# Keywords of the plans of FlashInfer's newer releases: how many rows each request has, which changes nothing here, and
# whether an e4m3 cache has a scale for each token and head.
_FLASHINFERS = {"uniform_q_len", "use_token_head_sf"}
PLAN_KEYWORDS = {"variant", "chunk", "kv_format", *_FLASHINFERS}  # that plans take by **own


class Own(NamedTuple):
    """Options that FlashInfer does not have: keywords of the decode and prefill wrappers' plans; those of latent rows
    have none."""

    variant: Any = None  # a flashpage.Variant
    chunk: int | None = None  # tokens: a row at position p sees tokens from p // chunk * chunk on; None: all
    kv_format: Any = None  # a name of kernels/kv_formats.py, or a pair of names and element types for K and V

    @staticmethod
    def of(given: dict[str, Any]) -> Own:
        """From a plan's keywords, with FlashInfer's own."""
        if given.keys() & _FLASHINFERS:
            has_scales = checks.flag("use_token_head_sf", given.get("use_token_head_sf", False))
            given = {name: value for name, value in given.items() if name not in _FLASHINFERS}
            if has_scales:
                if given.get("kv_format") not in (None, "e4m3_token"):
                    raise PlanError(f"use_token_head_sf=True means kv_format='e4m3_token', not {given['kv_format']!r}.")
                given["kv_format"] = "e4m3_token"
        if unknown := given.keys() - set(Own._fields):
            raise TypeError(f"plan() got an unexpected keyword argument {min(unknown)!r}")
        return Own(**given)


class DecodeArguments(NamedTuple):
    """Arguments of a decode wrapper's plan."""

    num_qo_heads: Any
    num_kv_heads: Any
    head_dim: Any
    page_size: Any
    pos_encoding_mode: str = "NONE"
    window_left: Any = -1
    window_right: Any = 0
    logits_soft_cap: Any = None
    q_data_type: Any = "float16"
    kv_data_type: Any = None
    o_data_type: Any = None
    data_type: Any = None
    sm_scale: Any = None
    rope_scale: Any = None
    rope_theta: Any = None
    fixed_split_size: Any = None
    disable_split_kv: bool = False
    q_len_per_req: Any = 1
    own: dict[str, Any] = {}  # keywords of Own

    def checked(self) -> tuple[Options, RunOptions]:
        """The options, and the run-time values that runs use by default."""
        checks.refuse_given(window_right=self.window_right)
        rows = checks.whole("q_len_per_req", self.q_len_per_req, 1)
        q_data_type, kv_data_type = types_of(self.q_data_type, self.kv_data_type, self.data_type)
        options = check_options(
            kv_source="paged",
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim,
            head_dim_vo=None,
            page_size=self.page_size,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=self.o_data_type,
            causal=rows > 1,
            window_left=self.window_left,
            logits_soft_cap=self.logits_soft_cap,
            pos_encoding_mode=self.pos_encoding_mode,
            has_mask=False,
            fixed_split_size=self.fixed_split_size,
            disable_split_kv=self.disable_split_kv,
            uniform_q_len=rows,
            dim_names=("head_dim", "head_dim"),
            **Own.of(self.own)._asdict(),
        )
        return options, _values(self, options, options.causal)


class PrefillArguments(NamedTuple):
    """Arguments of a plan of the paged or the ragged prefill wrapper."""

    kv_source: str
    num_qo_heads: Any
    num_kv_heads: Any
    head_dim_qk: Any
    page_size: Any = 0
    head_dim_vo: Any = None
    has_mask: bool = False
    causal: bool = False
    pos_encoding_mode: str = "NONE"
    use_fp16_qk_reduction: bool = False
    sm_scale: Any = None
    window_left: Any = -1
    logits_soft_cap: Any = None
    rope_scale: Any = None
    rope_theta: Any = None
    q_data_type: Any = "float16"
    kv_data_type: Any = None
    o_data_type: Any = None
    fixed_split_size: Any = None
    disable_split_kv: bool = False
    own: dict[str, Any] = {}  # keywords of Own

    def checked(self) -> tuple[Options, RunOptions]:
        """The options, and the run-time values that runs use by default."""
        checks.refuse_given(use_fp16_qk_reduction=self.use_fp16_qk_reduction)
        options = check_options(
            kv_source=self.kv_source,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
            page_size=self.page_size,
            q_data_type=self.q_data_type,
            kv_data_type=self.kv_data_type,
            o_data_type=self.o_data_type,
            causal=self.causal,
            window_left=self.window_left,
            logits_soft_cap=self.logits_soft_cap,
            pos_encoding_mode=self.pos_encoding_mode,
            has_mask=self.has_mask,
            fixed_split_size=self.fixed_split_size,
            disable_split_kv=self.disable_split_kv,
            **Own.of(self.own)._asdict(),
        )
        return options, _values(self, options, bool(self.causal))


class LatentArguments(NamedTuple):
    """Arguments of a plan over latent rows, other than lengths."""

    num_heads: Any = None
    head_dim_ckv: Any = None
    head_dim_kpe: Any = None
    page_size: Any = None
    sm_scale: Any = None
    causal: Any = False
    q_data_type: Any = "float16"
    kv_data_type: Any = None
    kv_row_format: Any = None
    o_data_type: Any = None
    fixed_split_size: Any = None
    disable_split_kv: Any = False
    is_selected: bool = False  # each row lists its tokens
    q_len_per_req: Any = 0  # 0: the lengths say
    has_mask: bool = False
    has_two_caches: bool = False  # with is_selected: each row has a list for each of two caches

    @property
    def kv_source(self) -> str:
        if not self.is_selected:
            return "latent"
        return "two_lists" if self.has_two_caches else "selected"

    def checked(self) -> tuple[Options, RunOptions]:
        """The options, and the values that runs use."""
        if self.sm_scale is None:
            raise PlanError("sm_scale=None: pass the model's, such as 192 ** -0.5, as latent rows have other columns.")
        ckv = checks.whole("head_dim_ckv", self.head_dim_ckv, 1)
        kpe = checks.whole("head_dim_kpe", self.head_dim_kpe, 0)
        given = None if self.kv_data_type is None else checks.dtype("kv_data_type", self.kv_data_type)
        latent_format, kv_dtype = check_format(self.kv_row_format, given, (ckv, kpe))
        if self.has_two_caches and not has_two_caches(latent_format):
            raise PlanError(
                f"extra_indices with kv_row_format={self.kv_row_format!r}: rows of q list tokens of two caches in "
                "kv_row_format='deepseek_v4' alone."
            )
        options = check_options(
            kv_source=self.kv_source,
            num_qo_heads=checks.whole("num_heads", self.num_heads, 1),
            num_kv_heads=1,
            head_dim_qk=ckv + kpe,
            head_dim_vo=ckv,
            page_size=self.page_size,
            q_data_type=self.q_data_type,
            kv_data_type=kv_dtype,
            latent_format=latent_format,
            o_data_type=self.o_data_type,
            causal=self.causal,
            window_left=-1,
            logits_soft_cap=None,
            pos_encoding_mode="NONE",
            has_mask=self.has_mask,
            variant=None,
            fixed_split_size=self.fixed_split_size,
            disable_split_kv=self.disable_split_kv,
            uniform_q_len=1 if self.is_selected else self.q_len_per_req,
        )
        scale = check_scale(self.sm_scale, options.head_dim_qk)
        return options, RunOptions(options.causal, -1, 0.0, scale, None, None, "NONE")


Arguments: TypeAlias = DecodeArguments | PrefillArguments | LatentArguments


def types_of(q_data_type: Any, kv_data_type: Any, data_type: Any) -> tuple[Any, Any]:
    """The types of q and of the cache; `data_type` stands for each that is None, nvfp4's for the cache's alone."""
    if kv_formats.is_fp4(data_type):
        return q_data_type or "float16", data_type if kv_data_type is None else kv_data_type
    if data_type is not None:
        data_type = checks.dtype("data_type", data_type)
    if q_data_type is None:
        q_data_type = "float16" if data_type is None else data_type
    return q_data_type, data_type if kv_data_type is None else kv_data_type


def _values(given: DecodeArguments | PrefillArguments, options: Options, causal: bool) -> RunOptions:
    check_scale(given.sm_scale, options.head_dim_qk)
    check_rope(given.rope_scale, given.rope_theta)
    cap, window = check_soft_cap(given.logits_soft_cap), check_window(given.window_left)
    return RunOptions(causal, window, cap, given.sm_scale, given.rope_scale, given.rope_theta, given.pos_encoding_mode)


def options_of_device(options: dict[str, Any]) -> dict[str, Any]:
    """Keywords of plan_on_device as fields of the arguments."""
    fields = {name: value for name, value in options.items() if name not in Own._fields}
    return fields | {"own": {name: value for name, value in options.items() if name in Own._fields}}


def differ(arguments: tuple[Any, ...], others: tuple[Any, ...] | None) -> bool:
    """Whether they differ; an array has no single truth value, and is refused when it is checked."""
    try:
        return arguments != others
    except (RuntimeError, ValueError):
        return True


class Checked:
    """The options of the newest arguments; equal arguments are checked once. If a session is given, it has no plan
    while others are checked."""

    def __init__(self, session: Planner | None = None) -> None:
        self._session = session
        self._arguments: Arguments | None = None
        self._found: tuple[Options, RunOptions]

    def of(self, arguments: Arguments) -> tuple[Options, RunOptions]:
        try:
            is_new = arguments != self._arguments
        except (RuntimeError, ValueError):  # as in `differ`; a call would be a frame more in every plan
            is_new = True
        if is_new:
            self._arguments = None
            if self._session is not None:
                self._session.invalidate()
            self._found = arguments.checked()
            self._arguments = arguments
        return self._found


def sizes_signature(plan: inspect.Signature) -> inspect.Signature:
    """The signature of the decode wrapper's workspace_size, with options also by position, in plan's former order."""
    names = [name for name, p in plan.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    names += [name for name in _DEPRECATED_POSITIONS if name != "non_blocking"]
    by_position = [plan.parameters[name].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    return inspect.Signature([*by_position, plan.parameters["own"]], return_annotation="tuple[int, int]")


def named_options(positional: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments that the decode wrapper's plan got by position although FlashInfer now takes them by keyword."""
    if len(positional) > len(_DEPRECATED_POSITIONS):
        most = 7 + len(_DEPRECATED_POSITIONS)
        raise PlanError(
            f"plan was given {7 + len(positional)} positional arguments, at most {most}: pass options by keyword."
        )
    names = _DEPRECATED_POSITIONS[: len(positional)]
    warn(
        f"positional arguments of plan after page_size are deprecated: pass {', '.join(names)} by keyword",
        DeprecationWarning,
    )
    return dict(zip(names, positional, strict=True))
