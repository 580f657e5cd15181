"""Decode a batch through paged KV with a small model of the Llama architecture, and check its tokens against torch."""

from __future__ import annotations

import argparse

from . import values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=values.count, default=12, help="requests in the batch (default: 12)")
    parser.add_argument(
        "--new-tokens", type=values.count, default=64, help="most new tokens of a request (default: 64)"
    )
    parser.add_argument(
        "--model", choices=["llama", "latent"], default="llama", help="latent: with latent rows, as DeepSeek-V3"
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto (default): the GPU if there is one"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..demo.latent_model import LatentConfig
    from ..demo.main import run_demo

    config = LatentConfig() if arguments.model == "latent" else None
    return run_demo(arguments.requests, arguments.new_tokens, arguments.device, config)
