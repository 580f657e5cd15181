"""Every error that flashpage raises."""

from .base.errors import (
    CapabilityError,
    CompileError,
    DeviceError,
    FlashpageError,
    KernelMissingError,
    PlanError,
    RunError,
    VariantError,
)

__all__ = [
    "CapabilityError",
    "CompileError",
    "DeviceError",
    "FlashpageError",
    "KernelMissingError",
    "PlanError",
    "RunError",
    "VariantError",
]
