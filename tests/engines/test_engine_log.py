"""Logs of engines that failed, as tests/card/engine_ranks.py prints them."""

from __future__ import annotations

import pytest
from engine_log import END, in_short


def traceback(prefix: str, error: str) -> list[str]:
    levels = [f'  File "vllm/file{i}.py", line {i}, in call\n{prefix}    raise ValueError(text)' for i in range(80)]
    return [f"{prefix}{line}" for line in ("Traceback (most recent call last):", *levels, error)]


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "(EngineCore pid=7) ERROR 11-30 15:22:10 [core.py:1131] "])
def test_the_first_error_is_shown_next_to_the_end(prefix: str) -> None:
    first = traceback(prefix, "ValueError: Mismatch in `image` token count\nof a text")
    second = traceback(prefix, "ValueError: Failed to apply PaliGemmaProcessor")
    before = "WARNING [cpu.py:440] Failed to import: ModuleNotFoundError(\"No module named 'vllm._C'\")"
    shown = in_short("\n".join([before, *first, f"{prefix}The above exception was the direct cause:", *second]))
    assert shown.startswith("its first error:") and shown.endswith("Failed to apply PaliGemmaProcessor")
    error, _, end = shown.partition("the end of its log:")
    assert "Mismatch in `image` token count\nof a text" in error and "file79.py" in error and "file1.py" not in error
    assert "Mismatch" not in end and len(end) == END + 1


def test_an_error_that_the_end_shows_is_shown_once() -> None:
    assert in_short("\n".join(traceback("", "RuntimeError: no card"))).count("no card") == 1
    assert in_short("killed") == "the end of its log:\nkilled"


def test_a_traceback_that_was_cut_off() -> None:
    log = "\n".join([*traceback("", "")[:-1], "x" * END])
    assert "Traceback" in in_short(log).partition("the end")[0]
