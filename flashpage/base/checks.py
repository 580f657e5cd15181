"""Checks of single arguments, shared by every public function. Messages name the argument, its value and the fix."""

from __future__ import annotations

import math
import operator
from typing import Any, NoReturn

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from . import tensor_memory
from .dtypes import DType
from .errors import CapabilityError, FlashpageError, PlanError, RunError

LAYOUTS = ("NHD", "HND")
POSITION_ENCODINGS = ("NONE", "ROPE_LLAMA", "ALIBI")
BACKENDS = ("auto", "fa2", "fa3")  # FlashInfer's names for what one kernel choice covers here
DEFAULT_ROPE_SCALE, DEFAULT_ROPE_THETA = 1.0, 1e4

_VARIANT_HINT = "pass plan(..., variant=flashpage.Variant(...)), whose one source runs on the CPU and on the card"
_OTHER_BLOCKS = "it belongs to FlashInfer's kernels cake and vsa: leave it None"
_SPARSE_SCALES = (
    "scales of single tokens belong to FlashInfer's Sage kernels: leave it None "
    "(BlockSparseAttentionWrapper.run has scale_q, scale_k and scale_v)"
)
_NO_SCALES = "rows of q's type have no scales, and those of kv_row_format hold theirs: leave it None"
_REASONS = {
    "use_fp16_qk_reduction": "scores are accumulated in fp32: leave it False",
    "jit_args": f"FlashInfer's C++ variants are not compiled here: {_VARIANT_HINT}",
    "jit_kwargs": f"FlashInfer's C++ variants are not compiled here: {_VARIANT_HINT}",
    "jit_module": "FlashInfer's compiled modules are not run here: pass a flashpage.Variant instead",
    "skip_softmax_threshold_scale_factor": "it belongs to the trtllm-gen kernels: leave it None",
    "use_fp16_softmax": "softmax is computed in fp32: leave it None",
    "uses_spcompress": "it belongs to the trtllm-gen kernels: leave it None",
    "return_lse_p": "run returns only the two outputs: use BatchPODWithPagedKVCacheWrapper.run(return_lse=True)",
    "return_lse_d": "run returns only the two outputs: use BatchPODWithPagedKVCacheWrapper.run(return_lse=True)",
    "custom_mask_d": "a decode's row sees all of its tokens: use BatchPrefillWithPagedKVCacheWrapper for masked rows",
    "packed_custom_mask_d": "a decode's row sees all of its tokens: use BatchPrefillWithPagedKVCacheWrapper",
    "block_mask": "it belongs to the Blackwell kernels: use VariableBlockSparseAttentionWrapper for masks of heads",
    "kv_block_lens": _OTHER_BLOCKS,
    "q2k_indices": _OTHER_BLOCKS,
    "q2k_num": _OTHER_BLOCKS,
    "kv_splits": _OTHER_BLOCKS,
    "use_clc": _OTHER_BLOCKS,
    "q_scale": _SPARSE_SCALES,
    "k_scale": _SPARSE_SCALES,
    "v_scale": _SPARSE_SCALES,
    "nvfp4_4over6": "a scale is the largest number of its 16 by 6: leave it None",
    "variant_owns_mask": f"FlashInfer's C++ variants are not compiled here: {_VARIANT_HINT}",
    "o_scale": "outputs are 16 or 32 bits wide and need no scale: leave it None",
    "window_right": "decode rows see no later tokens: leave it 0",
    "lse_layout": "LSE is [rows, heads]: pass 'NH', and transpose where another layout is needed",
    "v_indptr": "K and V share kv_indptr: leave it None",
    "o_indptr": "out has the rows of q: leave it None",
    "num_colocated_ctas": "plans are for the whole card: leave it 0",
    "rope_scale": "nothing is rotated in the kernel here: rotate q and K before, and leave it None",
    "rope_theta": "nothing is rotated in the kernel here: rotate q and K before, and leave it None",
    "skip_softmax": "no kernel here skips tiles of a softmax: leave it False",
    "kv_len": "plan has the lengths: leave it None",
    "page_table": "plan has the page numbers: leave it None",
    "ckv_scale": _NO_SCALES,
    "ckv_scale_arr": _NO_SCALES,
    "kpe_scale": _NO_SCALES,
    "bmm1_scale": "pass sm_scale to plan, and ckv_scale and kpe_scale of fp8 rows to run",
    "bmm2_scale": "pass ckv_scale and kpe_scale of fp8 rows to run, or multiply the output",
    "scale_mode": "it belongs to Blackwell kernels: pass 'default', sm_scale, and the scales of fp8 rows to run",
    "seq_lens_q": "rows of a request come from qo_indptr: leave it None",
}


_LARGEST_FLOAT, _LEAST_FLOAT = 2.0**128, 2.0**-126  # of fp32, the type in which kernels get numbers
_CONTAINERS = (list, tuple, set, frozenset, dict, range, torch.Tensor)
_MOST_SHOWN = 60  # characters of a value in a message


def shown(value: object) -> str:
    """A value for a message, in a few words however large it is."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"ndarray of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, _CONTAINERS) and (len(value) > 3 or any(isinstance(entry, _CONTAINERS) for entry in value)):
        return f"{type(value).__name__} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def refuse(name: str, value: object) -> NoReturn:
    """Refuses an option that no kernel supports."""
    raise CapabilityError(f"{name}={shown(value)} is not supported: {_REASONS[name]}.")


def refuse_given(**values: Any) -> None:
    """Refuses options whose values are not None, False or 0."""
    for name, value in values.items():
        if value is not None and (isinstance(value, torch.Tensor) or value):
            refuse(name, value)


def refuse_all(**values: Any) -> None:
    """Refuses options that are given at all, 0 and False too."""
    for name, value in values.items():
        if value is not None:
            refuse(name, value)


def refuse_run_options(skip_softmax: Any, use_fp16_softmax: Any, uses_spcompress: Any, lse_layout: str) -> None:
    """Refuses arguments of run that only some of FlashInfer's own kernels take."""
    if not (skip_softmax is None and use_fp16_softmax is None and uses_spcompress is None):
        refuse_given(
            skip_softmax_threshold_scale_factor=skip_softmax,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
        )
    if lse_layout != "NH":
        refuse("lse_layout", lse_layout)


def extra_positions(args: tuple[Any, ...]) -> str:
    return (
        f"run was given {len(args)} positional arguments after the cache (FlashInfer's jit_args). "
        f"Instead, {_VARIANT_HINT}."
    )


def layout(kv_layout: str, error: type[FlashpageError] = PlanError, name: str = "kv_layout") -> str:
    if not isinstance(kv_layout, str) or kv_layout not in LAYOUTS:
        raise error(f"{name}={shown(kv_layout)} is unknown: pass 'NHD' or 'HND'.")
    return kv_layout


def backend(name: str) -> str:
    if not isinstance(name, str) or name not in BACKENDS:
        raise CapabilityError(
            f"backend={shown(name)} is not part of flashpage: pass 'auto'. "
            "'fa2' and 'fa3' mean the same here: card, dtypes and options choose the kernel."
        )
    return name


def position_encoding(mode: str) -> str:
    if mode.__class__ is not str or mode not in POSITION_ENCODINGS:
        raise PlanError(f"pos_encoding_mode={shown(mode)} is unknown: pass one of {', '.join(POSITION_ENCODINGS)}.")
    return mode


def choice(name: str, value: Any, accepted: tuple[str, ...], error: type[FlashpageError] = PlanError) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in accepted:
        raise error(f"{name}={shown(value)} is not accepted: pass {' or '.join(map(repr, accepted))}.")
    return value


def flag(name: str, value: Any, error: type[FlashpageError] = PlanError) -> bool:
    """A boolean: True, False, 1, 0 or numpy's. Strings and tensors are refused, as they would count as true."""
    if value is True or value is False:
        return value
    if value.__class__.__name__ not in ("int", "bool", "bool_") or value not in (0, 1):
        raise error(f"{name}={shown(value)} is of type {type(value).__name__}: pass True or False.")
    return bool(value)


def whole(name: str, value: Any, low: int, high: int = 2**31 - 1, error: type[FlashpageError] = PlanError) -> int:
    """An integer within [low, high]."""
    try:
        if isinstance(value, (bool, torch.Tensor)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise error(f"{name}={shown(value)} is of type {type(value).__name__}: pass an integer.") from None
    if not low <= number <= high:
        bound = f"at least {low}" if number < low else f"at most {high}"
        raise error(f"{name}={shown(number)} is out of range: pass {bound}.")
    return number


def real(name: str, value: Any, *, positive: bool = False, error: type[FlashpageError] = PlanError) -> float:
    """A number that fp32 can represent."""
    try:
        if isinstance(value, (bool, str, bytes, torch.Tensor)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise error(f"{name}={shown(value)} is of type {type(value).__name__}: pass a number.") from None
    except OverflowError:
        number = math.inf
    if not abs(number) < _LARGEST_FLOAT or (positive and number <= 0):  # math.isfinite cannot be traced
        raise error(f"{name}={number} cannot be used: pass a {'positive ' if positive else ''}finite number of fp32.")
    if 0 < abs(number) < _LEAST_FLOAT:
        raise error(f"{name}={number} is too small for fp32: pass at least {_LEAST_FLOAT:.3g}, or 0.")
    return number


def device(value: Any, name: str = "device") -> torch.device:
    """A device on which kernels run."""
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise PlanError(f"{name}={shown(value)} runs no kernels: pass 'cpu' or 'cuda'.")
    return found


def dtype(name: str, value: Any) -> DType:
    try:
        return DType.of(value)
    except (KeyError, TypeError):
        known = ", ".join(d.value for d in DType.elements())
        raise PlanError(f"{name}={shown(value)} is not an element type of any kernel: pass one of {known}.") from None


def optional_dtype(name: str, value: Any) -> DType | None:
    """For plans whose runs take no scales of formats, so that uint8 is no nvfp4."""
    return None if value is None else dtype(name, value)


def dtype_of(tensor: torch.Tensor, name: str, error: type[FlashpageError], or_else: str = "") -> DType:
    """The element type of a tensor that kernels read. `or_else`: what else the caller may pass."""
    try:
        return DType.of(tensor.dtype)
    except KeyError:
        known = ", ".join(d.value for d in DType.elements())
        raise error(f"{name} has dtype {tensor.dtype}, which no kernel reads: pass one of {known}{or_else}.") from None


def same_device(tensor: torch.Tensor, device: torch.device, name: str, error: type[FlashpageError]) -> None:
    if tensor.device != device:
        raise error(f"{name} is on {tensor.device} but the work is on {device}: move it with {name}.to('{device}').")


def tensor(value: Any, name: str, error: type[FlashpageError]) -> torch.Tensor:
    """Returns the tensor if it is dense, has values and requires no gradient."""
    if not isinstance(value, torch.Tensor):
        raise error(f"{name}={shown(value)} is not a tensor: pass a torch.Tensor.")
    no_gradient(value, name, error)
    if is_dynamo_compiling():  # the operator's implementation checks the rest
        return value
    if value.layout is not torch.strided:
        raise error(f"{name} has layout {value.layout}: pass a dense tensor, such as {name}.to_dense().")
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise error(f"{name} is inside torch.vmap or a transform of torch.func: call this outside, with plain tensors.")
    if value.__class__ is torch.Tensor and not value.untyped_storage().nbytes() and value.numel() and not value.is_meta:
        raise error(f"{name} has elements but its storage was resized to 0: pass a tensor that has memory.")
    if value.is_meta:
        raise error(f"{name} is on meta, which has no values: pass a tensor on the CPU or on a CUDA device.")
    is_plain = value.__class__ is torch.Tensor or torch._C._len_torch_dispatch_stack()
    if not is_plain and tensor_memory.waited(value) is value:
        tensor_memory.address(value, name, error)
    return value


def no_gradient(value: torch.Tensor, name: str, error: type[FlashpageError]) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        raise error(
            f"{name} requires grad, but the output has no gradient. "
            f"Call this under torch.no_grad(), or pass {name}.detach()."
        )


def dense_last(value: torch.Tensor, name: str, error: type[FlashpageError]) -> None:
    """Checks that rows are contiguous along the head dimension; other strides are free."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise error(
            f"{name} has strides {tuple(value.stride())}: its last dimension must be contiguous. "
            f"Pass {name}.contiguous(), or make the head dimension the innermost."
        )


def sinks(given: torch.Tensor, heads: int, device: torch.device) -> None:
    tensor(given, "sinks", RunError)
    if given.shape != (heads,) or given.dtype != torch.float32 or not given.is_contiguous():
        raise RunError(
            f"sinks has shape {tuple(given.shape)} and dtype {given.dtype}: "
            f"pass one contiguous float32 value for each query head, [{heads}]."
        )
    same_device(given, device, "sinks", RunError)
