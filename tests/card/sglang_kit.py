"""The attention tests that SGLang's wheel ships, for flashpage's backend on a card: each compares a layer with SGLang's
reference in torch. Needs an installed SGLang with its `sglang.test.kits`.

    python tests/card/sglang_kit.py
    python tests/card/sglang_kit.py --backend fa3   # the same of SGLang's own
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import sys
import traceback
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

KIT = "sglang.test.kits.attention_unittest"
LATENT_DIM = 512  # kv_lora_rank; the kit's own of 32 is for kernels that take any


class Kit:
    """The kit's modules."""

    def __init__(self) -> None:
        self.dense, self.latent = (self._module(f"attention_methods.{name}_attention") for name in ("dense", "mla"))
        self.graphs = self._module("runner_modes.cuda_graph_decode_runner")
        self.verify = self._module("runner_modes.speculative_target_verify_runner")
        self.drafts = self._module("runner_modes.speculative_draft_extend_runner")
        self.mode = self.dense.ForwardMode

    @staticmethod
    def _module(name: str) -> Any:
        return importlib.import_module(f"{KIT}.{name}")

    def all(self, backend: str) -> Iterator[tuple[str, Callable[[Any], object]]]:
        """Names of checks, and calls that take a unittest.TestCase."""
        yield from self._of_dense(backend)
        yield from self._of_latent(backend)

    def _of_dense(self, backend: str) -> Iterator[tuple[str, Callable[[Any], object]]]:
        dense, wide = self.dense, {"head_dim": 128}
        windows = (
            *dense.make_swa_no_prefix_input_config_cases(backend),
            *dense.make_swa_prefix_input_config_cases(backend),
        )
        decodes = tuple(
            dense.DenseAttentionCase(
                f"swa_decode_{'_'.join(map(str, lens))}", backend, self.mode.DECODE, 4, 2, 16, lens, (), 4
            )
            for lens in ((2, 3, 4), (9, 30, 47))
        )
        for case in (*dense.make_dense_cases(backend), *windows, *decodes):
            yield case.name, lambda test, case=case: dense.run_dense_attention_case(test, case)
            yield f"{case.name}, d 128", lambda test, case=case: dense.run_dense_attention_case(test, case, **wide)
            if case.forward_mode.is_decode():
                run = self.graphs.run_dense_cuda_graph_decode_case
                yield f"{case.name}, graph", lambda test, case=case, run=run: run(test, case)
        guesses = dense.DenseAttentionCase(
            "guesses", backend, self.mode.TARGET_VERIFY, 4, 2, 16, (14, 15, 33), (3, 3, 3)
        )  # the kit has trees of three guesses
        for topk in (1, 2):
            run = self.verify.run_dense_eagle_verify_case
            yield f"guesses of {topk}", self._with_topk(topk, run, guesses)
            run = self.verify.run_dense_spec_verify_cuda_graph_case
            yield f"guesses of {topk}, graph", self._with_topk(topk, run, guesses)
        drafts = dataclasses.replace(guesses, name="drafts", forward_mode=self.mode.DRAFT_EXTEND_V2)
        run = self.drafts.run_dense_draft_extend_v2_cuda_graph_case
        yield "drafts, graph", lambda test, run=run: run(test, drafts)
        run = self.drafts.run_dense_eagle_draft_extend_v2_cuda_graph_runner_case
        yield "drafts, SGLang's runner", lambda test, run=run: run(test, drafts)

    def _with_topk(self, topk: int, run: Callable[..., object], case: Any) -> Callable[[Any], object]:
        """A check of trees, whose server's arguments say so; the kit's own say 0."""
        make = self.dense.make_mock_server_args

        def check(test: Any) -> object:
            def make_with_topk(**given: Any) -> Any:
                return make(**(given | {"speculative_eagle_topk": topk}))

            with mock.patch.object(self.dense, "make_mock_server_args", make_with_topk):
                return run(test, case, topk=topk)

        return check

    def _of_latent(self, backend: str) -> Iterator[tuple[str, Callable[[Any], object]]]:
        latent, sizes = self.latent, {"kv_lora_rank": LATENT_DIM, "qk_rope_head_dim": 64}
        for case in latent.make_mla_cases(backend):
            yield case.name, lambda test, case=case: latent.run_mla_attention_case(test, case, **sizes)
            if case.forward_mode.is_decode():
                run = self.graphs.run_mla_cuda_graph_decode_case
                yield f"{case.name}, graph", lambda test, case=case, run=run: run(test, case, **sizes)
        guesses = latent.MLAAttentionCase("mla_guesses", backend, self.mode.TARGET_VERIFY, 4, 16, (14, 33), (4, 4))
        run = self.verify.run_mla_eagle_verify_case
        yield "mla_guesses", lambda test, run=run: run(test, guesses, topk=1, **sizes)
        drafts = dataclasses.replace(guesses, name="mla_drafts", forward_mode=self.mode.DRAFT_EXTEND_V2)
        run = self.drafts.run_mla_draft_extend_v2_cuda_graph_case
        yield "mla_drafts, graph", lambda test, run=run: run(test, drafts, **sizes)
        run = self.drafts.run_mla_eagle_draft_extend_v2_cuda_graph_runner_case
        yield "mla_drafts, SGLang's runner", lambda test, run=run: run(test, drafts, **sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="flashpage", help="a name of SGLang's (default: %(default)s)")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    chosen = parser.parse_args()
    if importlib.util.find_spec("sglang") is None:
        print("skipped: SGLang is not installed")
        return 0
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry

    from flashpage.engines import sglang

    sglang.register()
    HookRegistry.apply_hooks()  # its factory of drafts knows our name by one
    torch.set_grad_enabled(False)  # some of the kit's layers have weights with gradients, and engines have none
    kit = Kit()
    kit.dense._SWA_DECODE_EXTEND_WINDOW |= {chosen.backend}  # a window has the row's own token, too
    test, failed, passed, skipped = unittest.TestCase(), [], 0, []
    for name, check in kit.all(chosen.backend):
        if chosen.only not in name:
            continue
        try:
            check(test)
            passed += 1
        except unittest.SkipTest as reason:
            skipped.append(f"{name}: {reason}")
        except Exception as error:
            failed.append(name)
            print(f"FAIL {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            traceback.print_exc(limit=-3)
    for line in skipped:
        print(f"skipped {line}")
    print(f"{passed} checks of SGLang's kit pass with {chosen.backend}, {len(skipped)} skipped, failed: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
