"""Multi-head latent attention (MLA): all query heads read one row a token, of which K is the whole and V the first
columns."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..base import checks
from ..base.errors import FlashpageError, PlanError, RunError
from ..base.warn import warn
from ..kernels.latent_formats import SCALED
from ..plan.lengths import Names
from ..plan.page_indices import Mask, Pages
from ..run.checks import NO_SCALES
from ..run.profiler_buffer import run_profiled
from .adapter import Adapter
from .engine_access.attributes import Buffer, Written, array_of_plan
from .engine_access.cached_module import LatentPlanModule
from .latent_attention import LatentAttention
from .latent_batch import MLAPlanMetadata
from .latent_contract import RunContract
from .latent_run import (
    CACHES,
    QUERIES,
    check_scale_mode,
    one_form,
    scales_of,
    use_run_names,
)
from .plan_arguments import LatentArguments, differ

_LATENT = Names("qo_indptr", "kv_indptr", "kv_len_arr", "kv_len_arr", "kv_indices")
_DENSE = Names("cum_seq_lens_q", "kv_indptr", "seq_lens", "seq_lens", "block_tables")
_LAYOUTS = ("split", "packed")
_LSE_MODES = ("none", "base2", "basee")
# FlashInfer's positional arguments of plan.
_FLAT = (
    *("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe"),
    *("page_size", "causal", "sm_scale", "q_data_type", "kv_data_type", "use_profiler"),
)


class BatchMLAPagedAttentionWrapper(Adapter):
    """Attention over latent rows in pages (DeepSeek, Kimi, GLM): `plan` once a step, `run` once a layer.

    Decode, appends and prompts in any mix; queries are absorbed, so a query row has head_dim_ckv + head_dim_kpe columns
    and an output row head_dim_ckv.

    Args:
        float_workspace_buffer: memory for partial results, contiguous, on the device that runs.
        use_cuda_graph: runs may be captured, and replayed after later plans of the same batch size.
        qo_indptr, kv_indptr, kv_len_arr: with `use_cuda_graph`; their lengths fix the batch.
        kv_indices: with `use_cuda_graph`; int32, plan copies the page numbers there.
        backend: "auto" ("fa2", "fa3": the same).
        custom_mask_buf: with `use_cuda_graph` and masks; uint8, plan copies the packed bits there.
    """

    _length_names = _LATENT
    _attention_class = LatentAttention
    _kv_indptr_buf = array_of_plan(1)
    _kv_indices_buf = Buffer(lambda state: state._planner.indices.tensor)
    _kv_len_arr_buf = Buffer(lambda state: state._planner.kv_lens().to(state.device, torch.int32))
    _page_size = Written(lambda state: state._planner.options.page_size)

    _uses_profiler = False
    _has_warned = False  # of arrays as keywords, once in a process

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
        *,
        custom_mask_buf: torch.Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, backend)
        self._is_natural = False  # whether LSEs are natural logarithms if a run does not say it
        self._contract: RunContract | None = None  # what the plan declared about its runs
        self._needs_scales = False
        self._enable_pdl: bool | None = None
        self._said: tuple[tuple[Any, ...], Any] | None = None  # keywords of the last plan, and what they led to
        buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        self._take_graph_buffers(None, **buffers, custom_mask_buf=custom_mask_buf)

    def plan(
        self,
        *flat: Any,
        metadata: MLAPlanMetadata | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        use_profiler: bool = False,
        query_layout: str | None = "split",
        kv_cache_layout: str | None = "split",
        lse_mode: str | None = None,
        output_dtype: Any = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
        kv_row_format: str | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
    ) -> None:
        """Plans a batch.

        Args:
            flat: deprecated: qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
                page_size, causal, sm_scale, q_data_type, kv_data_type and use_profiler by position.
            metadata: lengths and page numbers.
            qo_indptr, kv_indptr, kv_indices, kv_len_arr: deprecated: in place of `metadata`, those of
                `MLAPlanMetadata.csr`.
            cum_seq_lens_q, block_tables, seq_lens, max_q_len: deprecated: in place of `metadata`, those of
                `MLAPlanMetadata.dense`.
            num_heads: query heads, any number.
            head_dim_ckv, head_dim_kpe: columns that K and V share, and those that only K has (0: none).
            page_size: tokens a page.
            causal: (None: False) row r of a request sees tokens up to kv_len - q_len + r.
            sm_scale: multiplies the scores; the model's, which no shape here tells.
            q_data_type, kv_data_type, output_dtype: types of q (None: float16), of the latent rows and of the output
                (None: q's). Rows of float8_e4m3fn have scales, which are given at run.
            query_layout, kv_cache_layout: "packed": runs get one tensor, or two that are views of one, side by side;
                "split" or None: one or two.
            lse_mode: of the LSEs of runs: "base2", "basee", or "none": runs return none, unless csr's arrays are given
                in place of `metadata`; None: base 2, or as a run says.
            use_profiler: whether runs may get a `profiler_buffer`.
            output_scale: "none".
            scale_mode: "default", or "kv-per-tensor" for rows of float8_e4m3fn, which have scales in either mode.
            skip_softmax: False.
            enable_pdl: programmatic dependent launch of the runs; None: if the card has it.
            use_sinks: all runs get sinks; False: a run may get them.
            kv_row_format: fp8 rows that hold their scales, in one cache of bytes: "deepseek_v32" (656 bytes: 512 e4m3,
                four fp32 scales, 64 bf16) or "deepseek_v4" (584 bytes: 448 e4m3, 64 bf16, and after all rows of a page
                eight bytes of scales each; head_dim_ckv 512, head_dim_kpe 0). None: rows of kv_data_type.
            fixed_split_size: pages; every request is cut at multiples of this size, so that results do not depend on
                the rest of the batch. None: balanced.
            disable_split_kv: no request is cut.
            custom_mask: for trees of guesses: each request's q_len x kv_len booleans (True: visible), flattened and
                joined; it replaces causal, and the host reads the lengths. For rows of q's type.
            packed_custom_mask: the mask as bits, `segment_packbits(mask, indptr, bitorder="little")`.
        """
        said = (
            *(num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type),
            *(use_profiler, query_layout, kv_cache_layout, lse_mode, output_dtype, output_scale, scale_mode),
            *(skip_softmax, enable_pdl, use_sinks, kv_row_format, fixed_split_size, disable_split_kv),
        )
        has_arrays = not (
            custom_mask is packed_custom_mask is qo_indptr is kv_indptr is kv_indices is kv_len_arr is None
            and cum_seq_lens_q is block_tables is seq_lens is None
            and max_q_len is None
        )
        is_usual = not (flat or has_arrays) and metadata.__class__ is MLAPlanMetadata
        if is_usual and self._said is not None and self._said[1] is self._arguments:
            # Steps of a server repeat the last plan's keywords. `differ` would be a frame more in every plan.
            try:
                is_known = said == self._said[0]
            except (RuntimeError, ValueError):
                is_known = False
            if is_known:
                self._now = self._planned
                self._plan(metadata, None)  # type: ignore[arg-type]
                return
        checks.refuse_given(skip_softmax=skip_softmax)
        checks.choice("output_scale", output_scale, ("none",))
        use_sinks = checks.flag("use_sinks", use_sinks)
        enable_pdl = None if enable_pdl is None else checks.flag("enable_pdl", enable_pdl)
        if output_dtype is not None:
            output_dtype = checks.dtype("output_dtype", output_dtype)
        for name, layout in (("query_layout", query_layout), ("kv_cache_layout", kv_cache_layout)):
            if layout is not None:  # any
                checks.choice(name, layout, _LAYOUTS)
        if lse_mode is not None:
            checks.choice("lse_mode", lse_mode, _LSE_MODES)
        given = _by_position(flat)
        if "use_profiler" in given and use_profiler is not False:
            raise PlanError("use_profiler is given by position and by keyword: pass one.")
        use_profiler = checks.flag("use_profiler", given.pop("use_profiler", use_profiler))
        # FlashInfer's positional arguments, which are None where a caller leaves them out.
        for name, value in (
            ("qo_indptr", qo_indptr),
            ("kv_indptr", kv_indptr),
            ("kv_indices", kv_indices),
            ("kv_len_arr", kv_len_arr),
            ("num_heads", num_heads),
            ("head_dim_ckv", head_dim_ckv),
            ("head_dim_kpe", head_dim_kpe),
            ("page_size", page_size),
            ("causal", causal),
            ("sm_scale", sm_scale),
            ("q_data_type", q_data_type),
            ("kv_data_type", kv_data_type),
        ):
            if value is not None:
                if name in given:
                    raise PlanError(f"{name} is given by position and by keyword: pass one.")
                given[name] = value
        dense = {"cum_seq_lens_q": cum_seq_lens_q, "block_tables": block_tables, "seq_lens": seq_lens}
        arrays = {name: given.pop(name) for name in _FLAT[:4] if name in given}
        arrays |= {n: value for n, value in (dense | {"max_q_len": max_q_len}).items() if value is not None}
        layouts, is_flat_csr = (query_layout, kv_cache_layout), "qo_indptr" in arrays
        contract = RunContract.of(use_sinks, lse_mode, layouts, is_flat_csr=is_flat_csr)
        metadata = self._metadata(metadata, arrays, is_by_position=bool(flat))
        check_scale_mode(scale_mode, given.get("kv_data_type"), kv_row_format)
        mask = Mask.of(custom_mask, packed_custom_mask)
        # Keywords alone, which always have a value.
        own = {"o_data_type": output_dtype, "fixed_split_size": fixed_split_size, "disable_split_kv": disable_split_kv}
        arguments = LatentArguments(**given, **own, kv_row_format=kv_row_format, has_mask=mask is not None)
        if differ(arguments, self._arguments):
            self._check(arguments)
        self._now = self._planned
        self._plan(metadata, mask)
        # Set last, because after a refused plan the runs of the plan before go on.
        self._enable_pdl, self._is_natural, self._uses_profiler = enable_pdl, lse_mode == "basee", use_profiler
        self._contract, self._needs_scales = contract, self._options.latent_format == SCALED
        self._said = (said, self._arguments) if is_usual else None

    begin_forward = plan

    @classmethod
    def _metadata(cls, metadata: Any, arrays: dict[str, Any], *, is_by_position: bool) -> MLAPlanMetadata:
        """The batch, from one object or from arrays of one form."""
        if metadata is not None:
            if arrays:
                raise PlanError(f"metadata and {min(arrays)} both give the batch: pass one of them.")
            if not isinstance(metadata, MLAPlanMetadata):
                raise PlanError(f"metadata={checks.shown(metadata)}: pass MLAPlanMetadata.csr, dense or dual.")
            return metadata
        if not arrays:
            raise PlanError(
                "metadata=None: pass MLAPlanMetadata.csr, dense or dual, or the four arrays of csr as keywords."
            )
        csr, dense = (sorted(name for name in arrays if (name in _FLAT) is is_csr) for is_csr in (True, False))
        if csr and dense:
            raise PlanError(f"{csr[0]} and {dense[0]} belong to two forms of a batch: pass MLAPlanMetadata.dual.")
        if not is_by_position and not BatchMLAPagedAttentionWrapper._has_warned:
            BatchMLAPagedAttentionWrapper._has_warned = True
            form = "csr" if csr else "dense"
            warn(f"arrays of plan are deprecated: pass metadata=MLAPlanMetadata.{form}(...)", DeprecationWarning)
        return MLAPlanMetadata(**arrays)

    def _plan(self, given: MLAPlanMetadata, mask: Mask | None) -> None:
        # Unpacked at once, as attributes and a property of the batch would take a tenth of a microsecond more.
        rows, ends, indices, lens, table_rows, table, table_lens, most = given
        if rows is not None and lens is not None and table_rows is table is table_lens is None is most:  # csr
            self._planner.batch.names = _LATENT
            self._attention.plan((rows, ends, None, lens), (indices, None, True, None), self._options, self._now, mask)
            return
        self._planner.batch.names = _DENSE if given.is_dense else _LATENT
        try:
            if given.is_on_device and mask is None:
                self._plan_tables(given)
                return
            pages = Pages(given.kv_indices, given.block_tables)
            self._attention.plan(given.lengths(self._options.page_size), pages, self._options, self._now, mask)
        except FlashpageError as error:
            if given.is_dense:
                error.use_names({"qo_indptr": "cum_seq_lens_q", "kv_indices": "block_tables"})
            raise

    def _plan_tables(self, given: MLAPlanMetadata) -> None:
        """Plans on the device, which alone knows the lengths."""
        self._attention.plan_on_device(given.table_lengths(self.device, self._options), self._options, self._now)

    @property
    def _cached_module(self) -> Any:
        """Plans from host arrays, as SGLang's planning function does; None before the first `plan`."""
        return LatentPlanModule(self) if self._planner.active else None

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: Any = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        sinks: torch.Tensor | None = None,
        ckv_scale: Any = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> Any:
        """Attention of the planned batch.

        Args:
            q_nope, q_pe: [rows, heads, head_dim_ckv] and [rows, heads, head_dim_kpe]. If they are views of one tensor,
                side by side, it is read in place; two tensors are joined first.
            ckv_cache, kpe_cache: [pages, page_size, head_dim_ckv] and [pages, page_size, head_dim_kpe], any strides.
            out: [rows, heads, head_dim_ckv], written in place; None: allocated.
            lse: [rows, heads] fp32, written in place.
            return_lse: also return lse, of plan's lse_mode, which must not be "none".
            profiler_buffer: uint64 [n], if plan got use_profiler: gets the events of each CTA, as
                flashinfer.profiler.export_to_perfetto_trace reads them; the call waits for the run.
            return_lse_base_on_e: lse has natural logarithms; not if plan got lse_mode="base2".
            query: in place of q_nope and q_pe, the pair of them, or one tensor [rows, heads, head_dim_ckv +
                head_dim_kpe].
            kv_cache: in place of both caches, the pair of them, or one tensor [pages, page_size, head_dim_ckv +
                head_dim_kpe]; with kv_row_format one tensor of bytes, [pages, page_size, 656 or 584].
            sinks: [heads] fp32, natural-log units, which join the denominator.
            ckv_scale, kpe_scale: needed for rows of float8_e4m3fn: what their elements are multiplied by, numbers or
                tensors of one float32.
            ckv_scale_arr: in place of ckv_scale, float32 [pages, page_size, head_dim_ckv / 128], contiguous: one scale
                for 128 columns of a token.

        A `query` or a `kv_cache` may also be a pair of the tensor and the pair, as FlashInfer takes both forms. Other
        arguments belong to FlashInfer's kernels and are refused.
        """
        if not (
            o_scale is kv_len is page_table is skip_softmax_threshold_scale_factor is bmm1_scale is bmm2_scale is None
        ):
            checks.refuse_all(
                o_scale=o_scale,
                kv_len=kv_len,
                page_table=page_table,
                bmm1_scale=bmm1_scale,
                bmm2_scale=bmm2_scale,
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            )
        scales = NO_SCALES
        if self._needs_scales or not ckv_scale is ckv_scale_arr is kpe_scale is None:
            options = self._options if self._planner.active else None
            scales = scales_of(options, ckv_scale, ckv_scale_arr, kpe_scale)
        # A call of one_form would be a frame more.
        q: Any = q_nope, q_pe
        if query is not None:
            q = one_form("query", query, QUERIES, q_nope, q_pe)
        cache: Any = ckv_cache, kpe_cache
        if kv_cache is not None:
            cache = one_form("kv_cache", kv_cache, CACHES, ckv_cache, kpe_cache)
        run = self._attention.run
        if return_lse_base_on_e is not False:
            return_lse_base_on_e = checks.flag("return_lse_base_on_e", return_lse_base_on_e, RunError)
        if return_lse_base_on_e or self._is_natural:
            run = self._attention.run_of("basee")
        try:
            if self._contract is not None:
                self._contract.check(q, cache, lse, return_lse, return_lse_base_on_e, sinks)
            if self._uses_profiler or profiler_buffer is not None:
                given = (q, cache, out, lse, return_lse, self._now, scales, sinks, self._enable_pdl)
                stamped = functools.partial(run, *given)
                return run_profiled(self._attention, profiler_buffer, self._uses_profiler, stamped, is_latent=True)
            return run(q, cache, out, lse, return_lse, self._now, scales, sinks, self._enable_pdl)
        except FlashpageError as error:
            use_run_names(error, query, kv_cache)
            raise

    run_return_lse = functools.partialmethod(run, return_lse=True)


def _by_position(flat: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments of FlashInfer's former plan by their names."""
    if not flat:
        return {}
    if isinstance(flat[0], MLAPlanMetadata):
        raise PlanError("metadata was given by position: pass metadata=.")
    if len(flat) > len(_FLAT):
        raise PlanError(f"plan was given {len(flat)} positional arguments: pass metadata= and keywords.")
    warn("positional arguments of plan are deprecated: pass metadata= and keywords", DeprecationWarning)
    return {name: value for name, value in zip(_FLAT, flat, strict=False) if value is not None}
