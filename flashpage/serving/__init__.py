"""A small engine: requests in, greedy tokens out, over the attention backend of flashpage.integrations.

* request     one request: its tokens, and where it stands
* blocks      the paged pool: who has which block, and which blocks hold which tokens already
* scheduler   which tokens of which requests the next step computes
* batch       those tokens as tensors
* runner      a step of the model: eager, or a captured graph
* engine      the loop around them
"""

from .engine import Engine, EngineConfig, Statistics
from .request import Request, State
from .runner import Attend, Model, ModelConfig

__all__ = ["Attend", "Engine", "EngineConfig", "Model", "ModelConfig", "Request", "State", "Statistics"]
