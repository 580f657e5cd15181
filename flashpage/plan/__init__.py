"""Makes a plan on the device from the lengths of a batch, once a step."""

from .report.plan import Plan, plan_lengths

__all__ = ["Plan", "plan_lengths"]
