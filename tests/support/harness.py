"""Runs a row of the case table through the public wrappers on a device and compares it with the reference.

Memory that a kernel must not read is NaN (unused pages, tail slots, gaps between rows, workspaces), outputs are NaN
before the run, and out and lse stand between guard bands that must not change. tests/kernels/test_cases.py runs the
whole table; without pytest and installation: `PYTHONPATH=. python tests/support/harness.py --device cuda --reduced`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import format_rows
import latent_rows
import torch
from caches import poison
from cases.case import Case
from cases.variants import VARIANTS
from comparison import GUARD_BYTES, GUARD_VALUE, Outputs, Report, compare
from inputs import Inputs, is_ragged, make_inputs, out_scale, pack_bits, reference_states

from flashpage.kernels.context_classes import CLASSES, ContextClass
from flashpage.kernels.context_lengths import ContextLengths

WRAPPERS = {
    "decode": "BatchDecodeWithPagedKVCache",
    "paged": "BatchPrefillWithPagedKVCache",
    "ragged": "BatchPrefillWithRaggedKVCache",
    "sink": "BatchAttentionWithAttentionSink",
}
WORKSPACE_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}


class Runner:
    """One case on one device, through the wrapper or function that its entry names."""

    def __init__(self, inputs: Inputs, device: str, library: Any) -> None:
        self.inputs, self.case, self.device, self.library = inputs, inputs.case, device, library
        self.outputs: Outputs | None = None

    def run(self) -> Outputs:
        if self.case.entry.startswith("single"):
            return self._run_single()
        if self.case.entry == "latent":
            return self._run_latent()
        wrapper = self.planned()
        q, kv = self.q(), self.kv()
        if self.case.at_run:
            forward = wrapper.forward_return_lse if self.case.outputs != "no_lse" else wrapper.forward
            return self._outputs(forward(q, *kv, **self._run_values()))
        extra = self._scale_arguments() | self._out_scale() | self._lse_mode() | self.kv_cache_sf()
        if self.inputs.sinks is not None:
            extra["sinks"] = self.inputs.sinks.to(self.device)
        if self.case.entry == "sink":
            extra["sm_scale"] = self.case.sm_scale
        if self.case.outputs in ("given", "strided"):
            given = self.make_outputs()
            result = wrapper.run(q, *kv, out=given.out, lse=given.lse, return_lse=True, **extra)
            assert result[0].data_ptr() == given.out.data_ptr() and result[1].data_ptr() == given.lse.data_ptr()
            return given
        return self._outputs(wrapper.run(q, *kv, return_lse=self.case.outputs == "returned", **extra))

    def planned(self) -> Any:
        """A wrapper that has planned the case."""
        inputs, case = self.inputs, self.case
        workspace = poison(
            torch.empty(WORKSPACE_BYTES[self.device.split(":")[0]], dtype=torch.uint8, device=self.device)
        )
        wrapper = getattr(self.library, f"{WRAPPERS[case.entry]}Wrapper")(
            workspace, case.kv_layout, **self._more_options()
        )
        poison(wrapper._int_workspace_buffer)
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
        pages = (inputs.indptr, inputs.indices.to(self.device), inputs.last_page_len)
        values = self._plan_values()
        if case.entry == "decode":
            wrapper.plan(*pages, *heads, case.page_size, q_len_per_req=case.q_lens[0], **values)
            return wrapper
        values |= {
            "head_dim_vo": case.head_dim_vo or None,
            "causal": case.causal ^ case.at_run,
            **self._mask_arguments(),
        }
        if not is_ragged(case):
            wrapper.plan(inputs.qo_indptr, *pages, *heads, case.page_size, **values)
        else:
            wrapper.plan(inputs.qo_indptr, inputs.indptr, *heads, **values)
        return wrapper

    def q(self) -> torch.Tensor:
        q = torch.cat(self.inputs.q)
        if self.case.q_strides == "fused_qkv":
            heads = self.case.num_q_heads + 2 * self.case.num_kv_heads
            row = poison(torch.empty(len(q), heads, self.case.head_dim, dtype=q.dtype)).to(self.device)
            row[:, : self.case.num_q_heads] = q.to(self.device)
            return row[:, : self.case.num_q_heads]
        return q.to(self.device)

    def kv(self) -> tuple[Any, ...]:
        """The cache as one argument, or K and V as two."""
        argument = self.inputs.cache.argument(self.device)
        if self.case.kv_format:
            argument = format_rows.argument(self.case, self.inputs.cache, self.device)
        return tuple(half[0] for half in argument) if is_ragged(self.case) else (argument,)

    def kv_cache_sf(self) -> dict[str, Any]:
        """The scales of formats as an argument of run."""
        if self.inputs.scale_cache is None:
            return {}
        found = format_rows.scales_argument(self.case, self.inputs.scale_cache, self.device)
        is_lost = isinstance(found, tuple) and found[0] is found[1] is None  # two element types have none
        if is_ragged(self.case):
            found = tuple(None if half is None else half[0] for half in found)
        return {} if is_lost else {"kv_cache_sf": found}

    def make_outputs(self) -> Outputs:
        """NaN between guard bands; strided: there are gaps between rows and heads of out, which are guarded too."""
        rows, heads, dim = sum(self.case.q_lens), self.case.num_q_heads, self.case.value_dim
        strides = ((heads + 1) * (dim + 16), dim + 16, 1) if self.case.outputs == "strided" else (heads * dim, dim, 1)
        out, out_memory = self._guarded((rows, heads, dim), strides, getattr(torch, self.case.out_type))
        lse, lse_memory = self._guarded((rows, heads), (heads, 1), torch.float32)
        return Outputs(out, lse, {"out": out_memory, "lse": lse_memory})

    def _guarded(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Any:
        size = shape[0] * strides[0] * dtype.itemsize + 2 * GUARD_BYTES
        memory = torch.full((size,), GUARD_VALUE, dtype=torch.uint8, device=self.device)
        view = memory.view(dtype).as_strided(shape, strides, GUARD_BYTES // dtype.itemsize)
        return view.fill_(math.nan), memory

    def _outputs(self, result: Any) -> Outputs:
        return Outputs(*result) if isinstance(result, tuple) else Outputs(result, None)

    def _more_options(self) -> dict[str, Any]:
        """The sink wrapper's further constructor arguments."""
        if self.case.entry != "sink":
            return {}
        dims = {"head_dim_qk": self.case.head_dim, "head_dim_vo": self.case.value_dim}
        names = ("q_data_type", "kv_data_type", "window_left", "pos_encoding_mode")
        types = {"kv_data_type": torch.uint8} if self.case.kv_format else {}
        return {**dims, **{name: value for name, value in self._plan_values().items() if name in names}, **types}

    def _plan_values(self) -> dict[str, Any]:
        """Keywords of every plan. A case `at_run` plans with other values, which forward must replace."""
        case = self.case
        values: dict[str, Any] = {
            "q_data_type": getattr(torch, case.q_dtype),
            "kv_data_type": getattr(torch, case.kv_type),
            "o_data_type": case.o_dtype or None,
            "pos_encoding_mode": case.position,
            "window_left": 5 if case.at_run else case.window_left,
            "logits_soft_cap": 7.0 if case.at_run else case.soft_cap or None,
            "sm_scale": 0.77 if case.at_run else case.sm_scale,
            "rope_scale": case.rope_scale or None,
            "rope_theta": case.rope_theta or None,
            "fixed_split_size": case.fixed_split_size or None,
            "disable_split_kv": case.disable_split_kv,
        }
        if case.kv_format:
            values |= format_rows.plan_arguments(case)
        if case.chunk:
            values["chunk"] = case.chunk
        if case.variant:
            values["variant"] = self.library.Variant(**VARIANTS[case.variant](self.device).arguments)
        return values

    def _run_values(self) -> dict[str, Any]:
        case = self.case
        values = {
            "window_left": case.window_left,
            "logits_soft_cap": case.soft_cap,
            "sm_scale": case.score_scale,
        }
        return values if case.entry == "decode" else {"causal": case.causal, **values}

    def _mask_arguments(self) -> dict[str, Any]:
        if self.inputs.masks is None:
            return {}
        if self.case.mask == "packed":
            return {"packed_custom_mask": pack_bits(self.inputs.masks).to(self.device)}
        return {"custom_mask": torch.cat([mask.flatten() for mask in self.inputs.masks]).to(self.device)}

    def _lse_mode(self) -> dict[str, Any]:
        return {} if self.case.lse_mode == "base2" else {"lse_mode": self.case.lse_mode}

    def _scale_arguments(self) -> dict[str, Any]:
        return {name: self._on_device(value) for name, value in self.inputs.scales.items()}

    def _out_scale(self) -> dict[str, Any]:
        scale = out_scale(self.case)
        return {} if scale is None else {"o_scale": self._on_device(scale)}

    def _on_device(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def _run_latent(self) -> Outputs:
        inputs, case = self.inputs, self.case
        workspace = poison(
            torch.empty(WORKSPACE_BYTES[self.device.split(":")[0]], dtype=torch.uint8, device=self.device)
        )
        second: dict[str, Any] = {}
        options: dict[str, Any] = {
            "num_heads": case.num_q_heads,
            "head_dim_ckv": case.value_dim,
            "head_dim_kpe": case.head_dim - case.value_dim,
            "page_size": case.page_size,
            "sm_scale": case.score_scale,
            "q_data_type": getattr(torch, case.q_dtype),
            "kv_data_type": None if case.packed_format else getattr(torch, case.kv_type),
            "kv_row_format": case.packed_format or None,
            "output_dtype": case.o_dtype or None,
            "fixed_split_size": case.fixed_split_size or None,
            "disable_split_kv": case.disable_split_kv,
        }
        if case.selected:
            assert inputs.masks is not None
            wrapper = self.library.BatchMLASparseAttentionWrapper(workspace)
            indices, lengths = latent_rows.lists(case, inputs.indptr, inputs.indices, inputs.masks)
            if case.second_page:
                two = latent_rows.two_lists(case, indices, lengths, inputs.cache.argument("cpu")[0].squeeze(2))
                indices, lengths, second = two.first, two.first_lengths, {"extra_kv_cache": two.cache.to(self.device)}
                options["extra_indices"], options["extra_topk_length"] = two.second.to(self.device), two.second_lengths
            wrapper.plan(indices.to(self.device), lengths, **options)
        else:
            wrapper = self.library.BatchMLAPagedAttentionWrapper(workspace)
            poison(wrapper._int_workspace_buffer)
            pages = (inputs.indptr, inputs.indices.to(self.device), torch.tensor(case.kv_lens))
            metadata = self.library.MLAPlanMetadata.csr(inputs.qo_indptr, *pages)
            wrapper.plan(metadata=metadata, causal=case.causal, **options)
        q = self.q()
        parts = [q[..., : case.value_dim], q[..., case.value_dim :]]
        if case.q_strides == "split":
            parts = [part.contiguous() for part in parts]
        caches = [half.squeeze(2) for half in inputs.cache.argument(self.device)]
        extra = latent_rows.run_arguments(case, inputs.cache, self.device)
        if case.packed_format:
            parts, caches, extra = [], [], {"query": q, "kv_cache": caches[0], **second}
        if inputs.sinks is not None:
            extra["sinks"] = inputs.sinks.to(self.device)
        if case.outputs in ("given", "strided"):
            given = self.make_outputs()
            wrapper.run(*parts, *caches, out=given.out, lse=given.lse, return_lse=True, **extra)
            return given
        return self._outputs(wrapper.run(*parts, *caches, return_lse=case.outputs == "returned", **extra))

    def _run_single(self) -> Outputs:
        case = self.case
        values: dict[str, Any] = {
            "kv_layout": case.kv_layout,
            "pos_encoding_mode": case.position,
            "sm_scale": case.sm_scale,
            "window_left": case.window_left,
            "logits_soft_cap": case.soft_cap or None,
            "rope_scale": case.rope_scale or None,
            "rope_theta": case.rope_theta or None,
            "return_lse": case.outputs == "returned",
        }
        values |= self._lse_mode() | self.kv_cache_sf()
        if case.kv_format and (kv_format := format_rows.plan_arguments(case).get("kv_format")):
            values["kv_format"] = kv_format
        if case.chunk:
            values["chunk"] = case.chunk
        scales = self._scale_arguments()
        if case.entry == "single_decode":
            result = self.library.single_decode_with_kv_cache(self.q()[0], *self.kv(), **values, **scales)
            return self._outputs(tuple(r[None] for r in result) if isinstance(result, tuple) else result[None])
        scales = {f"scale_{name[0]}": value for name, value in scales.items()}
        values |= {"o_dtype": case.o_dtype or None, **self._out_scale()}
        mask = self._mask_arguments()
        if mask.get("custom_mask") is not None:
            mask["custom_mask"] = mask["custom_mask"].reshape(case.q_lens[0], case.kv_lens[0])
        result = self.library.single_prefill_with_kv_cache(
            self.q(), *self.kv(), causal=case.causal, **mask, **values, **scales
        )
        return self._outputs(result)


@contextlib.contextmanager
def contexts_of_plans(*, may_be_few: bool = True) -> Iterator[set[ContextClass]]:
    """Replaces the class of contexts that plans find. Most cases have few rows; larger batches choose it otherwise."""
    found, original = set(), ContextLengths.of_batch
    few = CLASSES.index(ContextClass.FEW)

    def of(lengths: ContextLengths, call: int) -> ContextClass:
        rows = [row for row in lengths.table.rows[: lengths.table.count] if row.contexts == few]
        limits = [row.most_rows for row in rows]
        for row in rows if not may_be_few else ():
            row.most_rows = 0
        found.add(contexts := original(lengths, call))
        for row, limit in zip(rows, limits, strict=True):
            row.most_rows = limit
        return contexts

    with mock.patch.object(ContextLengths, "of_batch", of):
        yield found


def run_case(case: Case, device: str, library: Any = None) -> Report:
    """Runs a case and compares it with the reference. On a card, cases with few rows have their own tiles and run again
    with the usual ones."""
    if library is None:
        import flashpage as library
    inputs = make_inputs(case)
    states = reference_states(inputs)
    with contexts_of_plans() as found:
        report = compare(case, Runner(inputs, device, library).run(), states)
    if ContextClass.FEW in found and device != "cpu":
        with contexts_of_plans(may_be_few=False):
            report = compare(case, Runner(inputs, device, library).run(), states)
    return report


def main() -> int:
    """Runs cases without pytest: one line a case, and a summary."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1")
    parser.add_argument("--reduced", action="store_true", help="the short table for compute-sanitizer")
    parser.add_argument("--select", default="", help="cases whose name contains this text")
    parser.add_argument("--only-prebuild", action="store_true", help="compile the kernels of the cases and run none")
    parser.add_argument("--no-prebuild", action="store_true", help="compile kernels one by one, as cases need them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the references are small
    from cases import CASES, REDUCED
    from prebuild import prebuild

    table = REDUCED if arguments.reduced else CASES
    cases = [case for case in table if arguments.select in case.name and case.runs_on(arguments.device)]
    start = time.perf_counter()
    if not arguments.no_prebuild:
        print(f"{prebuild(cases, arguments.device)} kernels in {time.perf_counter() - start:.1f} s", flush=True)
    if arguments.only_prebuild:
        return 0
    failed = []
    for case in cases:
        start = time.perf_counter()
        try:
            outcome = f"ok    {run_case(case, arguments.device)}"
        except Exception as error:
            failed.append(case.name)
            outcome = f"FAIL  {type(error).__name__}: {error}"
        print(f"{case.name:32} {time.perf_counter() - start:6.2f} s  {outcome}", flush=True)
    print(f"{len(cases) - len(failed)} of {len(cases)} cases pass on {arguments.device}; failed: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
