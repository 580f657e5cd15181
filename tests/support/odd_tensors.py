"""Tensors whose memory kernels cannot use, each with words that the error must contain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from wrong_arguments import KINDS, workspace

import flashpage


def planned(kind: str = "decode", **changed: Any) -> Any:
    """A wrapper with the plan of wrong_arguments's batch, with some arguments changed."""
    name, plan_arguments, _ = KINDS[kind]
    wrapper = getattr(flashpage, name)(workspace())
    wrapper.plan(**(plan_arguments() | changed))
    return wrapper


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose storage was freed."""
    whole = torch.cat([tensor.flatten()[:4], tensor.flatten()])
    view = whole[4:].view(tensor.shape)
    whole.untyped_storage().resize_(0)
    return view


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage lost its end."""
    whole = tensor.clone()
    whole.untyped_storage().resize_(4)
    return whole


def cut(tensor: torch.Tensor) -> torch.Tensor:
    """A view at an offset, in a storage that lost its end and is larger than the view."""
    whole = torch.cat([tensor.flatten()] * 2)
    view = whole[tensor.numel() :].view(tensor.shape)
    whole.untyped_storage().resize_(view.nbytes + view.nbytes // 2)
    return view


class Wrapped(torch.Tensor):
    """A subclass without memory of its own, like DTensor."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


ODD: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "freed": (freed, "storage was resized to 0"),
    "shrunk": (shrunk, "storage was resized to 4"),
    "cut": (cut, r"storage was resized to \d+"),
    "negative": (torch._neg_view, r"resolve_neg\(\)"),
    "imaginary": (lambda t: torch.complex(t, t).conj().imag[...], r"strides|resolve_neg\(\)"),
    "grad": (lambda t: t.clone().requires_grad_(), "no_grad"),
    "parameter": (lambda t: torch.nn.Parameter(t.clone()), "no_grad"),
    "sparse": (lambda t: t.to_sparse(), r"to_dense\(\)"),
    "meta": (lambda t: t.to("meta"), "on meta"),
    "wrapped": (Wrapped, "Wrapped, which has no memory"),
    "functional": (torch._to_functional_tensor, "no memory of its own|requires grad"),
    "list": (lambda t: t.tolist(), r"(list|tuple) of|pair \(k_cache, v_cache\)"),
}
