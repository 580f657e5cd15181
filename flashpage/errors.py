"""Every error that flashpage raises."""

from .base.errors import (
    CapabilityError,
    CompileError,
    DeviceError,
    FlashpageError,
    KernelMissingError,
    PlanError,
    RunError,
    SettingError,
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
    "SettingError",
    "VariantError",
]
