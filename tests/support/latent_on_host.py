"""Runs a kernel over latent rows on the host: all of its warps as fibers (tests/native/latent_kernel.cpp)."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
from typing import Any

import latent_rows
import torch
from cases.case import Case
from host_maps import Map, map_of
from host_plans import attention_params, listed, merge, plan_of
from inputs import Inputs
from native_build import shared_library

from flashpage import native
from flashpage.kernels import devices, latent_e4m3_sm90, latent_formats
from flashpage.kernels.kernel import AttentionKernel
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.tensor_maps import loader_tokens
from flashpage.kernels.work import Problem, Work
from flashpage.wrappers.two_lists import SecondLists

_ELEMENTS = {"bfloat16": "Bf16", "float16": "Half", "float32": "float"}


def spec_of(kernel: AttentionKernel, case: Case) -> KernelSpec:
    rows = case.q_lens[0] if len(set(case.q_lens)) == 1 else 0
    options = dataclasses.replace(latent_rows.options_of(case), uniform_q_len=rows)
    work = Work(Problem(options, case.num_q_heads * max(case.q_lens)), devices.H200)
    assert not kernel.refusals(work)
    return kernel.spec(work)


def library(kernel: AttentionKernel, case: Case) -> ctypes.CDLL:
    spec = spec_of(kernel, case)
    assert spec.tile is not None
    source = {"HEADER": f'"{kernel.header}"', "KERNEL": kernel.cpp.removesuffix("<Traits>")}
    values: dict[str, Any] = source | {
        "CACHE": _ELEMENTS[case.q_dtype],
        "OUT": _ELEMENTS[case.out_type],
        "LOADER": spec.loader,
    }
    tile = {name: getattr(spec.tile, name) for name in ("tile_kv", "warps_q", "warps_kv", "warps_v", "stages", "ctas")}
    tile["tile_q"] = spec.tile.tile_q // spec.ctas
    values |= {name.upper(): value for name, value in tile.items()}
    values |= {"HEAD_DIM_QK": case.head_dim, "HEAD_DIM_VO": case.value_dim, "KV_SOURCE": spec.kv_source}
    values["LATENT_FORMAT"] = spec.latent_format
    columns = re.search(r"struct ValueProduct \{\s*static constexpr int columns = (\d+)", kernel.sources(spec))
    assert columns is not None
    values |= {
        "VALUE_COLUMNS": columns[1],
        "CTAS_OF_CLUSTER": 2 if "__cluster_dims__" in kernel.attributes(spec) else 1,
    }
    if kernel is latent_e4m3_sm90.KERNEL:
        in_e4m3 = spec.latent_format == latent_formats.SCALED
        values |= {"IN_E4M3": 1, "TAIL": "E4m3" if in_e4m3 else "CACHE"}
    flags = tuple(f"-D{name}={value}" for name, value in values.items())
    return ctypes.CDLL(str(shared_library("latent_kernel.cpp", first_include="hopper", flags=flags)))


def run(kernel: AttentionKernel, case: Case, inputs: Inputs, cut: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Runs the CTAs and, if units are cut, the merge; returns out, lse, and barriers that miss arrivals."""
    spec, q = spec_of(kernel, case), torch.cat(inputs.q)
    assert spec.tile is not None
    first, second = (half.squeeze(2) for half in inputs.cache.argument("cpu"))
    out = torch.full((len(q), case.num_q_heads, case.value_dim), math.nan, dtype=getattr(torch, case.out_type))
    lse = torch.full((len(q), case.num_q_heads), math.nan)
    planned_case, planned_inputs = listed(case, inputs) if case.selected else (case, inputs)
    planned = plan_of(planned_case, planned_inputs, spec.tile.tile_q, cut)
    indices, size = planned_inputs.indices, first.element_size()
    row_bytes = (case.value_dim * size, (case.head_dim - case.value_dim) * size)
    box = loader_tokens(spec.loader, case.page_size, spec.tile.tile_kv, *row_bytes)
    params = attention_params(
        case,
        (q, out, lse),
        inputs.sinks,
        kv_indices=indices.data_ptr(),
        plan=planned.data.ctypes.data,
        partial_out=planned.partial_out.data_ptr(),
        partial_lse=planned.partial_lse.data_ptr(),
        num_kv_heads=1,
        causal=case.causal,
        window_left=-1,
        group=native.make_fast_div(case.num_q_heads),
        page=native.make_fast_div(case.page_size),
        box_tokens=box,
        num_kv_indices=indices.numel(),
    )
    for view, half in ((params.k, first), (params.v, second)):
        view.data = half.data_ptr()
        view.page_stride, view.token_stride = half.stride()[:2]
    q_scale, k_scale = torch.tensor([0.5]), torch.tensor([4.0])  # on cards they are tensors
    if not case.row_format:  # rows of a format have the scales of their elements
        params.q_scale, params.k_scale, params.score_scale = (
            q_scale.data_ptr(),
            k_scale.data_ptr(),
            case.score_scale / 2,
        )
    if case.second_page:
        assert inputs.masks is not None
        given = latent_rows.lists(case, inputs.indptr, inputs.indices, inputs.masks)
        two = latent_rows.two_lists(case, *given, first)
        second = SecondLists(two.cache.view(torch.float8_e4m3fn), two.second, two.first_lengths)
        second.read_from(params, latent_rows.options_of(case), two.first.shape[1])
    scales = latent_rows.run_arguments(case, inputs.cache, "cpu")  # which must live as long as params
    latent_rows.set_scales(params, **scales)
    forms = [map_of(half.unsqueeze(2), (128, box, 1, 1)) if box else Map() for half in (first, second)]
    heads = min(case.num_q_heads, cta_rows := spec.tile.tile_q // spec.ctas)
    if kernel.query_boxes(spec) and cta_rows % heads == case.num_q_heads % heads == 0:
        params.query_box_rows = cta_rows // heads
        forms.append(map_of(q.transpose(0, 1).unsqueeze(0), (128, heads, params.query_box_rows, 1)))
    maps = (Map * 4)(*forms)
    args = native.VariantArgs()
    left = library(kernel, case).run_latent(ctypes.byref(params), ctypes.byref(args), maps, planned.num_ctas)
    if cut:
        merge(case, params)
    return out, lse, left
