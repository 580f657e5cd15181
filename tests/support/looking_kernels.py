"""Plans on the CPU as on a card whose kernels need a mask's tiles."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from flashpage import native
from flashpage.plan import prepared_kernels
from flashpage.plan.prepared_kernels import PreparedKernels


def look_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes plans look for tiles, by a kernel that does nothing."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)(lambda *_: None)
    handle = native.load().fp_kernel_from_function(ctypes.cast(function, ctypes.c_void_p))
    kernel = SimpleNamespace(handle=handle, info=native.KernelInfo(num_sms=1, ctas_per_sm=1), keeps=function)

    class Looking(PreparedKernels):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.mask_tiles = kernel  # type: ignore[assignment]

    monkeypatch.setattr(prepared_kernels, "PreparedKernels", Looking)
