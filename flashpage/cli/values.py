"""Values of command-line options, with errors that argparse shows in one line."""

from __future__ import annotations

import argparse
import math
import statistics

from ..base.errors import FlashpageError

MOST_CTAS = 1 << 16  # for which a plan takes 5 MB; cards run some thousand at once


class ArgumentError(FlashpageError):
    """A wrong argument that argparse cannot find, because it depends on others or on this machine."""


def count(text: str) -> int:
    """A whole number from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def ctas(text: str) -> int:
    """A number of CTAs of which a plan has room."""
    value = count(text)
    if value > MOST_CTAS:
        raise argparse.ArgumentTypeError(f"{text} is more than {MOST_CTAS}")
    return value


def head_dim(text: str) -> int:
    """A head dimension that kernels accept."""
    value = count(text)
    if value % 8 or not 16 <= value <= 512:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 8 from 16 to 512")
    return value


def lengths(text: str) -> list[int]:
    """Lengths of a batch: `300,17,4096`, or `64x4096` for 64 of 4096, or `zipf:64:4096` (kind, requests, mean)."""
    kind, *rest = text.split(":")
    try:
        if rest:
            batch, mean = map(int, rest)
            return distribution(kind, batch, mean)
        return [int(n) for part in text.split(",") for n in _repeat(part)]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of lengths: pass 300,17,4096 or 64x4096 (64 requests of 4096) or KIND:64:4096. "
            f"KIND is one of {', '.join(KINDS)}, followed by the requests and their mean length"
        ) from None


def _repeat(part: str) -> list[str]:
    times, _, length = part.rpartition("x")
    if not length.isdigit():
        raise ValueError(part)
    return [length] * (int(times) if times else 1)


KINDS = ("uniform", "one-long", "lognormal", "zipf")


def distribution(kind: str, batch: int, mean: int) -> list[int]:
    """Lengths [batch] with the given mean, as a serving batch has them. Equal arguments give equal lengths."""
    if kind not in KINDS or batch < 1 or mean < 1:
        raise ValueError(kind)
    if kind == "uniform":
        return [mean] * batch
    if kind == "one-long":
        short = max(1, mean // 16)
        return [mean * batch - short * (batch - 1)] + [short] * (batch - 1)
    if kind == "lognormal":  # quantiles of exp(normal)
        weights = [math.exp(_normal_quantile((i + 0.5) / batch)) for i in range(batch)]
    else:
        weights = [1 / (i + 1) for i in range(batch)]
    scale = mean * batch / sum(weights)
    return [max(1, round(weight * scale)) for weight in weights]


def _normal_quantile(p: float) -> float:
    return statistics.NormalDist().inv_cdf(p)


def q_lengths(given: list[int] | None, kv_lens: list[int]) -> list[int] | None:
    """The query rows of each request; a single number is that of all requests."""
    if given is None or len(given) == len(kv_lens):
        return given
    if len(given) != 1:
        raise ArgumentError(f"--q-lens has {len(given)} entries but the batch has {len(kv_lens)} requests")
    return given * len(kv_lens)


def heads(text: str) -> tuple[int, int]:
    """Query and KV heads, `32/8`; a single number means that both are equal."""
    first, _, second = text.partition("/")
    try:
        num_q_heads, num_kv_heads = int(first), int(second or first)
        if min(num_q_heads, num_kv_heads) < 1 or num_q_heads % num_kv_heads:
            raise ValueError(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not QUERY/KV heads: pass two numbers like 32/8, the first a multiple of the second"
        ) from None
    return num_q_heads, num_kv_heads
