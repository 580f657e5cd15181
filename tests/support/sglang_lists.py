"""SGLang's own backend for lists of tokens (`dsa`), with flashpage inside: `python sglang_lists.py`.

Its methods for decodes and prompts run on the CPU, up to the kernels of others, in whose places flashpage's are. What
they get from the engine, such as lists that a card's kernel has converted to slots, is drawn here.
"""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import torch
from latent_bytes import E4M3, LARGEST, SCALE_COLUMNS, quantised, v32_rows
from reference import Options, attention

HEADS, CKV, KPE, PAGE, SCALE = 3, 512, 64, 64, 0.05
COLUMNS = CKV + KPE


def stand_in_for_kernels() -> None:
    import stand_in

    with contextlib.suppress(ImportError):
        __import__("sgl_kernel")
        return
    stand_in.install("sgl_kernel", "sgl_kernel.sparse_flash_attn", "datasets")


def made(runner: SimpleNamespace) -> Any:
    """A backend by SGLang's registry, whose own initialisation asks a card."""
    from sglang.srt.layers.attention import dsa_backend
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    def initialise(self: Any, runner: SimpleNamespace, **given: Any) -> None:
        vars(self).update(vars(runner))

    dsa_backend.DeepseekSparseAttnBackend.__init__ = initialise  # type: ignore[method-assign]
    return ATTENTION_BACKENDS["dsa"](runner)


class Pool:
    """Rows in the cache, and where new ones are written."""

    def __init__(self, tokens: int, is_packed: bool) -> None:
        self.is_packed = is_packed
        self.rows = torch.randn(tokens, COLUMNS).bfloat16()
        self.cache = self._packed() if is_packed else self.rows.unsqueeze(1)
        self.written: list[torch.Tensor] = []

    def _packed(self) -> torch.Tensor:
        latent, rotated = self.rows[:, :CKV].float(), self.rows[:, CKV:]
        scales = latent.view(-1, CKV // SCALE_COLUMNS, SCALE_COLUMNS).abs().amax(-1) / LARGEST
        stored = quantised(latent, scales)
        factors = scales.repeat_interleave(SCALE_COLUMNS, 1)
        self.rows = torch.cat([stored.float() * factors, rotated.float()], -1)
        return v32_rows(stored, scales, rotated).unsqueeze(1).view(E4M3)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.cache

    def set_mla_kv_buffer(self, layer: Any, slots: torch.Tensor, k: torch.Tensor, k_rope: torch.Tensor) -> None:
        self.written.append(slots)


def check(kind: str, is_prompt: bool, is_packed: bool, topk: int = 128) -> None:
    """Decodes or a prompt's rows whose lists are of different lengths; one row has none."""
    torch.manual_seed(0)
    rows, pool = 5, Pool(4 * PAGE, is_packed)
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    counts = torch.tensor([topk, 7, 1, 0, 40], dtype=torch.int32)
    lists = torch.full((rows, topk), -1, dtype=torch.int32)
    for row, count in zip(lists, counts.tolist(), strict=True):
        row[:count] = torch.randperm(4 * PAGE)[:count].int()
    metadata = SimpleNamespace(dsa_cache_seqlens_int32=counts, dsa_cu_seqlens_q=None, dsa_cu_seqlens_k=None)
    vars(metadata).update(
        dsa_max_seqlen_q=1, flashmla_metadata=SimpleNamespace(flashmla_metadata=None, num_splits=None)
    )
    runner = SimpleNamespace(forward_metadata=metadata, token_to_kv_pool=pool, hisparse_coordinator=None)
    vars(runner).update(use_mha=False, use_fused_topk=True, dsa_topk_backend=DSATopKBackend.SGL_KERNEL)
    vars(runner).update(dsa_prefill_impl=kind, dsa_decode_impl=kind, dsa_kv_cache_store_fp8=False, device_sm_major=9)
    vars(runner).update(dsa_index_kpool=1)  # of newer versions
    backend = made(runner)
    layer = SimpleNamespace(is_cross_attention=False, tp_q_head_num=HEADS, head_dim=COLUMNS, v_head_dim=CKV)
    vars(layer).update(layer_id=0, scaling=SCALE, logit_cap=0.0, tp_k_head_num=1)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND if is_prompt else ForwardMode.DECODE)
    vars(batch).update(out_cache_loc=torch.arange(rows), batch_size=rows)
    q = torch.randn(rows, HEADS, COLUMNS).bfloat16()
    k = torch.zeros(rows, 1, CKV).bfloat16()
    run = backend.forward_extend if is_prompt else backend.forward_decode
    given = {"q_rope": q[..., CKV:].flatten(1), "k_rope": k[..., :KPE], "topk_indices": lists}
    out = run(q[..., :CKV].flatten(1), k, k, layer, batch, **given)
    out = out.reshape(rows, HEADS, CKV)
    assert len(pool.written) == 1
    for i, row in enumerate(q):
        seen = pool.rows[lists[i][lists[i] >= 0].long()].unsqueeze(1)
        expected = attention(row[None], seen, seen[..., :CKV], Options(SCALE)).out[0]
        error = (out[i].double() - expected).norm() / expected.norm().clamp(min=1e-9)
        assert error < 0.01, (kind, is_prompt, is_packed, i, float(error))


def main() -> None:
    stand_in_for_kernels()
    os.environ["FLASHPAGE_SGLANG"] = "on"
    from flashpage.engines.sglang import register

    register()
    for is_prompt in (False, True):
        for is_packed in (False, True):
            for kind in ("flashmla_sparse", "flashmla_kv", "tilelang", *(() if is_packed else ("fa3",))):
                check(kind, is_prompt, is_packed)
    print("equal")


if __name__ == "__main__":
    main()
