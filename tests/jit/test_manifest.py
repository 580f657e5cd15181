"""Manifests from files: every field is checked before a kernel is made of it, and an error is one line."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from aot import build as aot_build
from flashpage import kernels
from flashpage.cli import main
from flashpage.errors import CompileError
from flashpage.jit import manifest
from flashpage.jit.render import render
from flashpage.kernels import json_records
from flashpage.kernels.spec import _FIELDS, KernelSpec

INJECTED = "0; } int injected = 1; //"
TILE = {"tile_q": 128, "tile_kv": 128, "warps_q": 8, "warps_kv": 1, "stages": 2}
SPEC = {
    "kernel": "prefill_sm90",
    "q_dtype": "float16",
    "kv_dtype": "float16",
    "out_dtype": "float16",
    "head_dim_qk": 128,
    "head_dim_vo": 128,
    "kv_source": "paged",
    "latent_format": "plain",
    "k_format": "plain",
    "v_format": "plain",
    "mask_source": "implicit",
    "position_encoding": "none",
    "tile": TILE,
    "variant": {
        "logit": "score",
        "mask": "",
        "tensors": [["slopes", "float32", 1]],
        "scalars": [["cap", "float"]],
    },
    "loader": "boxes",
    "trace": False,
}
MANIFEST = {"flashpage_manifest": 1, "kernels": [{"target": "sm_90a", "spec": SPEC}]}
BAD: list[Any] = [
    *(-1, 1.5, 10**9, 10**30, INJECTED, f"boxes{INJECTED}", "a\nb", "\0", "sm_90a;rm", "x" * 100_000),
    *([], {}, [[]], {"a": {"b": []}}, ["none"], [["a"] * 9], "Ünïcode", "FLOAT-16", " "),
]
WIDE = "score\x00 + 1"  # refused even in a variant's source


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values of a JSON document, outer ones first."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [at, *(place for key, value in inner for place in places(value, (*at, key)))]


def changed(place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The manifest with one value replaced."""
    root = {"": copy.deepcopy(MANIFEST)}
    inner: Any = root
    for key in ("", *place)[:-1]:
        inner = inner[key]
    inner[("", *place)[-1]] = value
    return root[""]


def is_code(place: tuple[Any, ...], value: Any) -> bool:
    """Whether the value is a string in place of a variant's source: any string is accepted there, as it is code."""
    return (
        place[-1:] in (("logit",), ("mask",)) and isinstance(value, str) and len(value) < 1 << 16 and "\0" not in value
    )


def is_allowed(place: tuple[Any, ...], value: Any) -> bool:
    """Values of the list above that the field accepts."""
    empty = {("tensors",): [], ("scalars",): [], ("kernels",): [], ("variant",): {}}
    return is_code(place, value) or (place[-1:] in empty and value == empty[place[-1:]])


MUTATED = [(place, value) for place in places(MANIFEST) for value in BAD if not is_allowed(place, value)]
MUTATED += [
    ((*place, "extra"), 1) for place in places(MANIFEST) if place[-1:] in ((), ("spec",), ("tile",), ("variant",))
]
MUTATED += [(place, True) for place in places(MANIFEST) if place[-1:] != ("trace",)]
MUTATED += [(place, None) for place in places(MANIFEST) if place[-1:] != ("tile",)]
MUTATED += [(("kernels", 0, "spec", "variant", "logit"), WIDE)]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that the command prints."""
    assert main(["build", *arguments]) == 2, arguments
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == "" and len(line) < 600, line
    return line


def test_mutated_manifests(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong value each: exit code 2 and one line, and no kernel is made."""
    made: list[object] = []
    monkeypatch.setattr("flashpage.jit.build_kernels", lambda *given: made.append(given) or [])
    assert len(MUTATED) > 200
    path = tmp_path / "kernels.json"
    for place, value in MUTATED:
        path.write_text(json.dumps(changed(place, value)))
        line = refusal(capsys, str(path))
        named = next((str(key) for key in reversed(place) if isinstance(key, str)), "manifest")
        assert named in line or "manifest" in line, (place, line)
        with pytest.raises(ValueError):
            manifest.read_manifest(path)
    assert made == []


MALFORMED = {
    "no JSON": b"kernels",
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "a number of many digits": b'{"flashpage_manifest": ' + b"1" * 10_000 + b"}",
    "a list": b"[]",
    "empty": b"",
    "many": json.dumps({"flashpage_manifest": 1, "kernels": [{}] * 10_001}).encode(),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_file_that_is_no_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    path = tmp_path / "kernels.json"
    path.write_bytes(content)
    refusal(capsys, str(path))
    with pytest.raises(SystemExit) as stopped:
        aot_build.main(["--manifest", str(path)])
    assert stopped.value.code == 2


def test_a_sound_manifest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(MANIFEST))
    ((spec, target),) = manifest.read_manifest(path)
    assert (spec.kernel, spec.variant.tensors, target.name) == ("prefill_sm90", (("slopes", "float32", 1),), "sm_90a")


def test_a_target_that_the_kernel_has_not(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(changed(("kernels", 0, "target"), "sm_80")))
    with pytest.raises(ValueError, match=r"kernels\[0\].target is 'sm_80': prefill_sm90 is not compiled for it"):
        manifest.read_manifest(path)


def test_every_field_is_judged() -> None:
    """Every field of KernelSpec has a row."""
    assert set(_FIELDS) == set(KernelSpec("merge").to_json()) == set(SPEC)


def test_specs_of_accepted_fields_render_or_are_refused() -> None:
    """Any combination of values: an error is a CompileError, and rendered sources contain no free text of the
    fields."""
    draw, dtypes = random.Random(22), ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    outcomes = set()
    for _ in range(300):
        spec = SPEC | {
            "kernel": draw.choice([*kernels.ATTENTION, *kernels.OTHERS]).name,
            **{name: draw.choice(dtypes) for name in ("q_dtype", "kv_dtype", "out_dtype")},
            "tile": draw.choice([None, {name: draw.choice([1, 3, 64, 128, 4096]) for name in TILE}]),
            "loader": draw.choice(["", "boxes", "rows", "converted", "transposed", "columns", "blocks"]),
            "head_dim_qk": draw.choice([0, 7, 128, 1024]),
        }
        try:
            render(KernelSpec.from_json(spec))
            outcomes.add("rendered")
        except CompileError:
            outcomes.add("refused")
    assert outcomes == {"rendered", "refused"}


def test_a_refusal_shows_a_short_value() -> None:
    with pytest.raises(ValueError) as caught:
        json_records.choice("none")("spec.loader", "x" * 1_000_000)
    assert len(str(caught.value)) < 150
