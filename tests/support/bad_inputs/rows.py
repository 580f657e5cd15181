"""The table: a row for each function, argument and badness, with the expected outcome."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashpage.base.errors import FlashpageError
from flashpage.wrappers.plan_arguments import Own

from .arguments import OTHER_WORDS, kind_of
from .expected import EXPECTED, NOT_TRIED
from .kinds import Badness, NotApplicable
from .scene import Arguments, Make, Scene, Step
from .scenes import scenes

LONGEST_MESSAGE = 1000  # characters; a CapabilityError lists every kernel's reason


@dataclasses.dataclass(frozen=True)
class Row:
    """A scene with one thing wrong: an argument, the order of calls, or torch's defaults around it."""

    scene: Scene
    step: int
    argument: str
    badness: str
    change: Callable[[Make, Arguments], None] | None  # None: `play` runs the scene
    play: Callable[[Scene, Make], Any] | None = None
    default: str = "error"

    @property
    def name(self) -> str:
        return f"{self.scene.name}.{self.where}.{self.argument}.{self.badness}"

    @property
    def where(self) -> str:
        return self.scene.steps[self.step].name if self.play is None else "order"

    @functools.cached_property
    def expected(self) -> tuple[str, str]:
        """The outcome, and a regular expression that must match an error's message."""
        words = OTHER_WORDS.get(self.argument)
        pattern = rf"\b({self.argument}{'|' + words if words else ''})\b"
        for names, outcome, says in EXPECTED:
            if fnmatch.fnmatchcase(self.name, names):
                return outcome, says or pattern
        return self.default, pattern


def parameters(step: Step, found: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(step.function(found)).parameters.values())


@functools.cache
def table(device: str, family: str = "all") -> list[Row]:
    """The rows of all families, or of one."""
    rows: list[Row] = []
    seen: set[str] = set()
    for scene in scenes().values():
        if device == "cpu" or scene.cuda:
            steps = _new_steps(scene, seen)
            if family in ("all", scene.family):
                rows += [row for i in steps for row in _rows_of(scene, i, device)]
                rows += _orders(scene)
    return [row for row in rows if not any(fnmatch.fnmatchcase(row.name, names) for names in NOT_TRIED)]


def _new_steps(scene: Scene, seen: set[str]) -> list[int]:
    """The steps whose function no earlier scene has rows of."""
    steps = []
    for i, step in enumerate(scene.steps):
        function = step.function(_class_of(scene) if i else None)
        function = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
        key = f"{function.__module__}.{function.__qualname__}"
        if key not in seen:
            steps.append(i)
        seen.add(key)
    return steps


def _rows_of(scene: Scene, i: int, device: str) -> Iterator[Row]:
    """Rows of a step, for each argument of its function."""
    make, step = Make("cpu"), scene.steps[i]
    known = step.needed(make) | step.optional(make)
    for parameter in parameters(step, _class_of(scene) if i else None):
        name = parameter.name
        if name == "self":
            continue
        if parameter.kind is parameter.VAR_KEYWORD and name in ("own", "options"):
            yield Row(scene, i, "windw_left", "unknown", functools.partial(_set, "windw_left", 3), default="missing")
            for own in Own._fields:
                yield from _rows_of_argument(scene, i, own, None, device)
        elif parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            yield from _rows_of_argument(scene, i, name, known.get(name), device)
            if parameter.default is parameter.empty:
                yield Row(scene, i, name, "missing", functools.partial(_leave_out, name), default="missing")
                # None is a valid value of these four.
                if name not in ("indptr", "indices", "alibi_slopes", "kv_cache_dtype"):
                    yield Row(scene, i, name, "none", functools.partial(_set, name, None))
            elif name in step.optional(make):
                yield Row(scene, i, name, "good", functools.partial(_good, step, name), default="clean")


def _class_of(scene: Scene) -> Any:
    return scene.steps[0].function(None)


def _rows_of_argument(scene: Scene, index: int, name: str, good: Any, device: str) -> Iterator[Row]:
    step = scene.steps[index]
    key = step.name if len(scene.steps) == 1 or index == 0 else f"{scene.steps[0].name}.{step.name}"
    make = Make("cpu")
    given = step.needed(make) | ({name: good} if good is not None else {})
    for badness in kind_of(key, name):
        if (device == "cpu" or badness.cuda) and _applies(badness, make, dict(given), name, good):
            change = functools.partial(_apply, badness, step, name)
            yield Row(scene, index, name, badness.name, change, default=badness.expect)


def _applies(badness: Badness, make: Make, given: Arguments, name: str, good: Any) -> bool:
    try:
        badness.apply(make, given, name, good)
    except NotApplicable:
        return False
    except (TypeError, IndexError, AttributeError, RuntimeError):  # no good value to change
        return False
    return True


def _apply(badness: Badness, step: Step, name: str, make: Make, given: Arguments) -> None:
    good = given.get(name)
    badness.apply(make, given, name, step.optional(make).get(name) if good is None else good)


def _set(name: str, value: Any, make: Make, given: Arguments) -> None:
    given[name] = value


def _good(step: Step, name: str, make: Make, given: Arguments) -> None:
    given[name] = step.optional(make)[name]


def _leave_out(name: str, make: Make, given: Arguments) -> None:
    given.pop(name)


# ---------------------------------------------------------------- the order of calls, and torch's state around them


def good_arguments(scene: Scene, make: Make) -> list[Arguments]:
    return [step.needed(make) for step in scene.steps]


def _last_first(scene: Scene, make: Make) -> Any:
    """The first and the last call alone, so that plan is left out."""
    given = good_arguments(scene, make)
    found, _ = dataclasses.replace(scene, steps=(scene.steps[0], scene.steps[-1])).run([given[0], given[-1]])
    return found


def _last_twice(scene: Scene, make: Make) -> Any:
    found, _ = scene.run(good_arguments(scene, make))
    return scene.run(good_arguments(scene, make), found, len(scene.steps) - 1)[1]


def _all_twice(scene: Scene, make: Make) -> Any:
    found, _ = scene.run(good_arguments(scene, make))
    return scene.run(good_arguments(scene, make), found, 1)[1]


def _copied(how: Callable[[Any], Any], scene: Scene, make: Make) -> Any:
    found, _ = scene.run(good_arguments(scene, make))
    twin = how(found)
    return scene.run(good_arguments(scene, make), twin, 1)[1]


def _pickled(found: Any) -> Any:
    return pickle.loads(pickle.dumps(found))


def _under(context: Callable[[], Any], scene: Scene, make: Make) -> Any:
    given = good_arguments(scene, make)
    with context():
        return scene.run(given)[1]


class _DefaultDtype:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(torch.float32)


def _orders(scene: Scene) -> Iterator[Row]:
    def row(argument: str, badness: str, play: Callable[..., Any], default: str) -> Row:
        return Row(scene, 0, argument, badness, None, play, default)

    yield row("default_device", "meta", functools.partial(_under, lambda: torch.device("meta")), "works")
    yield row("default_dtype", "float64", functools.partial(_under, _DefaultDtype), "works")
    yield row("mode", "inference", functools.partial(_under, torch.inference_mode), "works")
    yield row("mode", "no-grad", functools.partial(_under, torch.no_grad), "works")
    if len(scene.steps) > 2:
        yield row("plan", "left-out", _last_first, "error")
        yield row("run", "twice", _last_twice, "works")
        yield row("plan", "twice", _all_twice, "works")
        yield row("copy", "copy", functools.partial(_copied, copy.copy), "safe")
        yield row("copy", "deepcopy", functools.partial(_copied, copy.deepcopy), "safe")
        yield row("copy", "pickle", functools.partial(_copied, _pickled), "safe")


# ---------------------------------------------------------------- one row


def judge(row: Row, make: Make, baseline: Any) -> str | None:
    """Runs the row; returns a complaint about its outcome, or None."""
    outcome, says = row.expected
    found, result, error = _played(row, make)
    complaint = _judge_call(outcome, says, result, error, baseline)
    return _judge_object(row, make, baseline, found) or complaint


def _judge_call(outcome: str, says: str, result: Any, error: Exception | None, baseline: Any) -> str | None:
    if outcome == "any":
        return None
    if error is None:
        return _judge_result(outcome, result, baseline)
    if outcome == "works":
        return f"must work, but: {_shown(error)}"
    return _judge_error(outcome, says, error)


def _played(row: Row, make: Make) -> tuple[Any, Any, Exception | None]:
    """Runs the row; returns the object that the first step made, the result and the error."""
    scene, found = row.scene, None
    try:
        if row.play is not None:
            return None, row.play(scene, make), None
        given = good_arguments(scene, make)
        for i, step in enumerate(scene.steps):
            if i == row.step:
                assert row.change is not None
                row.change(make, given[i])
            result = step.function(found)(**given[i])
            if i == 0 and len(scene.steps) > 1:
                found = result
        if scene.results:
            result = [given[-1][name] for name in scene.results]
        return found, result, None
    except Exception as error:
        return found, None, error


def _judge_result(outcome: str, result: Any, baseline: Any) -> str | None:
    if outcome in ("error", "missing"):
        return f"no error, and {'the good' if equal(result, baseline) else 'a wrong'} result"
    if outcome != "clean" and not equal(result, baseline):
        return "a wrong result without an error"
    return None


def _judge_error(outcome: str, says: str, error: Exception) -> str | None:
    text = str(error)
    if outcome == "missing":
        return (
            None if isinstance(error, TypeError) and re.search(says, text) else f"no clear TypeError: {_shown(error)}"
        )
    if not isinstance(error, FlashpageError):
        return f"not a FlashpageError: {_shown(error)}"
    if outcome != "clean" and not re.search(says, text):
        return f"the message does not match {says!r}: {_shown(error)}"
    if len(text) > LONGEST_MESSAGE and "no kernel" not in text:
        return f"the message has {len(text)} characters: {_shown(error)}"
    return None


def _judge_object(row: Row, make: Make, baseline: Any, found: Any) -> str | None:
    """An object must work again after it has refused a call."""
    if found is None or row.step == 0:
        return None
    try:
        _, again = row.scene.run(good_arguments(row.scene, make), found, 1)
    except Exception as error:
        return f"the object does not work afterwards: {_shown(error)}"
    return None if equal(again, baseline) else "the object gives another result afterwards"


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
            and a.is_cpu + a.is_cuda > 0 and torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
        )  # fmt: skip
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(equal, a, b))
    if type(a).__module__.startswith("flashpage"):
        return type(a) is type(b)
    return bool(a == b)
