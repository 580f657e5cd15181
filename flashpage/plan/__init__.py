"""From the lengths of a batch to a plan on the device, once a step."""

from .report.plan import Plan, plan_lengths

__all__ = ["Plan", "plan_lengths"]
