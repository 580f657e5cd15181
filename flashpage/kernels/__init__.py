"""The kernels: what each accepts, its tiles and costs, and the choice among them. A kernel is one file here, one folder
of the same name in include/flashpage/kernels, and a row in this list."""

from __future__ import annotations

from . import (
    attention_sm80,
    blocks,
    cpu_attention,
    decode_sm90,
    helpers,
    latent_columns_sm90,
    latent_decode_sm90,
    latent_e4m3_sm90,
    latent_wide_sm90,
    prefill_sm89,
    prefill_sm90,
)
from .kernel import AttentionKernel, Kernel

# In order of preference: the first kernel that accepts a plan's work runs it.
ATTENTION: list[AttentionKernel] = [
    decode_sm90.KERNEL,
    prefill_sm90.KERNEL,
    latent_wide_sm90.KERNEL,
    latent_e4m3_sm90.KERNEL,
    latent_columns_sm90.KERNEL,
    latent_decode_sm90.KERNEL,
    prefill_sm89.KERNEL,
    attention_sm80.KERNEL,
    cpu_attention.KERNEL,
]
OTHERS: tuple[Kernel, ...] = (*helpers.KERNELS, *blocks.KERNELS)


def find(name: str) -> Kernel | None:
    """The kernel of that name (KernelSpec.kernel); None if no list above has it."""
    return next((kernel for kernel in (*ATTENTION, *OTHERS) if kernel.name == name), None)


_OF_PACKAGE = (*ATTENTION, *OTHERS)


def is_of_package(name: str) -> bool:
    """Whether the kernel's source depends only on the package's files, all of which paths.fingerprint covers. Kernels
    that a program adds to the list, or that have an include folder of their own, depend on other files."""
    kernel = find(name)
    return kernel is not None and kernel.include is None and any(kernel is known for known in _OF_PACKAGE)
