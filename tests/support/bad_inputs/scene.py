"""A scene is a list of calls with good arguments; the last one gives the result. scenes/ has one for each function."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

PAGES, PAGE, HEADS, KV_HEADS, DIM = 8, 16, 4, 2, 64

Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of a function ("flashpage.page:get_seq_lens"), or of a method (".plan") of the object that the scene's
    first step returned."""

    target: str
    needed: Callable[[Make], Arguments]  # the good arguments
    optional: Callable[[Make], Arguments] = lambda make: {}  # good values of further arguments
    on_object: bool = False  # the function takes the object as its first argument

    @property
    def name(self) -> str:
        return self.target.rsplit(":", 1)[-1].lstrip(".")

    def function(self, found: Any) -> Any:
        """The function to call; `found` is the first step's object or its class."""
        if self.target.startswith("."):
            return getattr(found, self.target[1:])
        module, name = self.target.split(":")
        function = getattr(importlib.import_module(module), name)
        return functools.partial(function, found) if self.on_object else function


@dataclasses.dataclass(frozen=True)
class Scene:
    name: str
    steps: tuple[Step, ...]
    results: tuple[str, ...] = ()  # arguments that the last call writes, if it returns nothing
    family: str = "attention"
    cuda: bool = True  # False: runs on the CPU alone

    def run(self, given: list[Arguments], found: Any = None, first: int = 0) -> tuple[Any, Any]:
        """Runs the steps from `first` on; returns the object and the last result."""
        result = None
        for i in range(first, len(self.steps)):
            result = self.steps[i].function(found)(**given[i])
            if i == 0 and len(self.steps) > 1:
                found = result
        if self.results:
            result = [given[-1][name] for name in self.results]
        return found, result


class Make:
    """Makes good tensors on a device; equal calls give equal tensors."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.dtype = torch.float32 if device == "cpu" else torch.float16

    def ints(self, *values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def data(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator, device="cpu").to(self.device, dtype or self.dtype)

    def floats(self, *shape: int) -> torch.Tensor:
        return self.data(*shape, dtype=torch.float32)

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.float32, device=self.device)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def bits(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bool, device=self.device)

    def workspace(self, size: int = 1 << 20) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def cache(self) -> torch.Tensor:
        return self.data(PAGES, 2, PAGE, KV_HEADS, DIM)


def function(
    target: str,
    needed: Callable[[Make], Arguments],
    optional: Callable[[Make], Arguments] = lambda make: {},
    **more: Any,
) -> Scene:
    more = {"family": "functions"} | more
    return Scene(target.split(":")[1], (Step(f"flashpage.{target}", needed, optional),), **more)
