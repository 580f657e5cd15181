"""Describes an installed FlashInfer to a test, with flashpage.compat or without: `python flashinfer_program.py JOB`.

The job is a JSON file: whether to install, modules with names that engines import, and the files to write.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import inspect
import json
import pickle
import pkgutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashpage import compat
from flashpage.base.errors import FlashpageError
from flashpage.engines.flashinfer.facade import PACKAGE, SUBMODULES
from flashpage.wrappers.plan_arguments import PLAN_KEYWORDS

# Objects that one process pickles and another reads; the first two are flashpage's with compat.
PICKLED = ("BatchDecodeWithPagedKVCacheWrapper", "merge_state", "SfLayout", "rmsnorm", "top_p_sampling_from_probs")


def described(value: Any) -> list[Any]:
    """Where an object comes from: a class, a function, a module, or the type of something else."""
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if inspect.isclass(value):
        return ["class", *(f"{base.__module__}.{base.__qualname__}" for base in value.__mro__)]
    if inspect.isroutine(value):
        return ["function", str(value.__module__), value.__qualname__]
    return ["value", type(value).__qualname__]


def described_modules() -> dict[str, list[Any] | dict[str, list[Any]]]:
    """The names of every module that can be imported, or the error of one that cannot."""
    import flashinfer

    found: dict[str, Any] = {}
    listed = pkgutil.walk_packages(flashinfer.__path__, "flashinfer.", onerror=lambda name: None)
    names = ["flashinfer", *(each.name for each in listed if not each.name.endswith("__main__"))]
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # of a package that is not here
            found[name] = ["error", type(error).__name__, str(error)]
        else:
            found[name] = {key: described(value) for key, value in vars(module).items() if key != "__loader__"}
    return found


def described_name(module: str, name: str) -> list[Any]:
    """What `from module import name` gives; a name with dots has attributes of modules."""
    try:
        value: Any = importlib.import_module(module)
        for part in filter(None, name.split(".")):
            value = getattr(value, part)
    except Exception as error:
        return ["error", type(error).__name__, str(error)]
    return described(value)


def other_than_ours() -> list[str]:
    """Names of attention that are not flashpage's objects."""
    modules = {name: importlib.import_module(f"flashinfer.{name}") for name in SUBMODULES}
    found = [
        f"{submodule}.{name}"
        for submodule, module in modules.items()
        for name, value in PACKAGE.served(submodule).items()
        if getattr(module, name) is not value
    ]
    package = importlib.import_module("flashinfer")
    served = {name: value for submodule in SUBMODULES for name, value in PACKAGE.served(submodule).items()}
    return found + [name for name, value in served.items() if getattr(package, name, value) is not value]


def asked_of_import() -> dict[str, Any]:
    """What tools ask about modules of which names were replaced, and about others."""
    import flashinfer.decode

    folder = Path(flashinfer.__file__).parent

    def origin(name: str) -> str | None:
        spec = importlib.util.find_spec(name)
        return None if spec is None else str(Path(str(spec.origin)).relative_to(folder))

    names = ("flashinfer", "flashinfer.decode", "flashinfer.sampling", "flashinfer.fused_moe.core", "flashinfer.absent")
    copied = pickle.loads(pickle.dumps(copy.deepcopy(flashinfer.decode.__spec__)))
    return {
        "origins": [origin(name) for name in names],
        "versions": [importlib.metadata.version("flashinfer-python"), flashinfer.__version__],
        "copied spec": Path(copied.origin).name,
        "source": "class BatchDecodeWithPagedKVCacheWrapper" in inspect.getsource(flashinfer.decode),
        "files": (importlib.resources.files("flashinfer") / "decode.py").is_file(),
    }


def differing_parameters() -> Iterator[str]:
    """Parameters and methods of FlashInfer's that flashpage's lacks, or has in another place."""
    seen = set()
    for submodule in SUBMODULES:
        module = importlib.import_module(f"flashinfer.{submodule}")
        for name, ours in PACKAGE.served(submodule).items():
            theirs = getattr(module, name, None)
            if theirs is None or name in seen:
                continue
            seen.add(name)
            if not inspect.isclass(theirs):
                yield from _differing(name, theirs, ours)
                continue
            for method, value in inspect.getmembers(theirs, callable):
                if method == "__init__" or not method.startswith("_"):
                    own = getattr(ours, method, None)
                    text = f"{name}.{method}"
                    yield from [text] if own is None else _differing(text, value, own)


def _differing(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    given, own = ([*inspect.signature(inspect.unwrap(each)).parameters.values()] for each in (theirs, ours))
    any_number = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    kinds, names = {each.kind for each in own}, [each.name for each in own]
    for place, each in enumerate(given):
        if each.kind in any_number:
            continue
        if each.name not in names:
            # Options of ours are keywords of `own`, among which plans take some of FlashInfer's.
            takes = each.VAR_KEYWORD in kinds and ("own" not in names or each.name in PLAN_KEYWORDS)
            if not takes:
                yield f"{name}({each.name})"
            continue
        is_elsewhere = names.index(each.name) != place or own[place].kind != each.kind
        if is_elsewhere and each.kind == each.POSITIONAL_OR_KEYWORD and each.VAR_POSITIONAL not in kinds:
            yield f"{name}({each.name}) at {place}"
    there = {each.name for each in given}
    for each in own:
        if each.default is each.empty and each.kind not in any_number and each.name not in there:
            yield f"{name} needs {each.name}"


def main(job: dict[str, Any]) -> None:
    found: dict[str, Any] = {}
    pickled = Path(job["pickled"])
    if job["compat"]:
        compat.install()
        found["not ours"] = other_than_ours()
    import flashinfer

    values = [getattr(flashinfer, name) for name in PICKLED]
    if job["compat"]:
        pickled.write_bytes(pickle.dumps(values))
    else:
        read = pickle.loads(pickled.read_bytes())
        found["unpickled"] = [described(value) for value in read]
        found["unpickled others"] = all(a is b for a, b in zip(read[2:], values[2:], strict=True))
        found["parameters"] = sorted(differing_parameters())
    found["asked of import"] = asked_of_import()
    found["asked"] = {f"{module}:{name}": described_name(module, name) for module, name in job["names"]}
    found["modules"] = described_modules()
    if job["compat"]:
        importlib.reload(flashinfer.decode)
        found["not ours"] += other_than_ours()
    else:
        try:
            compat.install()
        except FlashpageError as error:
            found["refused"] = str(error)
    Path(job["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
