"""When each CTA of a run started, loaded, computed and merged, next to what its plan predicted."""

from .run.stamps import StampedRun
from .watch.timeline import Timeline

__all__ = ["StampedRun", "Timeline"]
