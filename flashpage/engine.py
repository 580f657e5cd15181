"""A small engine: requests in, greedy tokens out."""

from .serving.engine import Engine, EngineConfig, Statistics
from .serving.request import Request, State
from .serving.runner import Attend, Model, ModelConfig

__all__ = ["Attend", "Engine", "EngineConfig", "Model", "ModelConfig", "Request", "State", "Statistics"]
