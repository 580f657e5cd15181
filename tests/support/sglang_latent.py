"""Steps of SGLang's models with latent rows, without SGLang, and the exact results."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import fake_sglang
import sglang_requests
import torch
from fake_sglang import ForwardMode, RadixAttention
from reference import Options, attention
from sglang_requests import CONTEXT, Requests

close = functools.partial(sglang_requests.close, least=1e-5)  # some roundings of fp32 sums
SCALE, HEADS, NOPE, DIM_V = 0.2, 4, 24, 32
# Columns of V, and those of K alone; on a card kernels have the sizes of models.
SIZES = {"cpu": (64, 32, torch.float32), "cuda": (512, 64, torch.bfloat16)}


class LatentScene(Requests):
    """A step of requests, and a layer over latent rows, absorbed and expanded."""

    def __init__(
        self, q_lens: list[int], kv_lens: list[int], device: str, page: int = 1, kv_type: torch.dtype | None = None
    ) -> None:
        super().__init__(q_lens, kv_lens, page, device)
        self.page, (self.ckv, self.kpe, self.dtype) = page, SIZES[torch.device(device).type]
        self.kv_type, columns = kv_type or self.dtype, self.ckv + self.kpe
        self.pool = fake_sglang.MLATokenToKVPool(self.size, columns, self.ckv, self.kv_type, device)
        self.layer = RadixAttention(0, (HEADS, 1, columns), SCALE, v_head_dim=self.ckv)
        self.expanded = RadixAttention(0, (HEADS, HEADS, NOPE + 24), SCALE, v_head_dim=DIM_V)
        self.rows = [self.draw(n, columns).to(self.kv_type).to(self.dtype) for n in kv_lens]
        self.q = self.draw(sum(q_lens), HEADS, columns)
        for i, (new, all_tokens) in enumerate(zip(q_lens, kv_lens, strict=True)):
            self.pool.set_kv_buffer(self.layer, self.slots_of(i, 0, all_tokens - new), self.rows[i][:-new, None], None)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.drawn).to(self.device, self.dtype)

    def runner(self, **server: Any) -> SimpleNamespace:
        return SimpleNamespace(
            device=self.device,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_type,
            page_size=self.page,
            model=torch.nn.ModuleList([self.layer, self.expanded]),
            model_config=SimpleNamespace(
                context_len=CONTEXT,
                head_dim=self.ckv + self.kpe,
                kv_lora_rank=self.ckv,
                qk_rope_head_dim=self.kpe,
                is_encoder_decoder=False,
                attention_chunk_size=None,
                hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"]),
                attention_arch=SimpleNamespace(name="MLA"),
                hf_text_config=SimpleNamespace(),
            ),
            req_to_token_pool=SimpleNamespace(req_to_token=self.slots.to(self.device)),
            token_to_kv_pool=self.pool,
            server_args=fake_sglang.server_args(page_size=self.page, **server),
        )

    def backend(self, **server: Any) -> Any:
        from flashpage.engines.sglang.backends import backend_of

        return backend_of(self.runner(**server))

    def batch(self, mode: ForwardMode, **more: Any) -> SimpleNamespace:
        """The ForwardBatch of a step. What chooses between absorbed and expanded rows is None, as in a new one."""
        chosen = ("mha_one_shot", "mha_return_lse", "attn_attend_prefix_cache", "prefix_chunk_idx")
        return super().batch(mode, **dict.fromkeys(chosen) | more)

    def run(self, backend: Any, batch: Any, is_apart: bool) -> torch.Tensor:
        """The absorbed layer's rows. `is_apart`: SGLang hands over the rotated columns apart."""
        new = torch.cat([rows[-m:] for rows, m in zip(self.rows, self.q_lens, strict=True)])[:, None]
        ckv, own = self.ckv, {}
        q, k = self.q, new
        if is_apart:
            q, k = q[..., :ckv], k[..., :ckv]
            own = {"q_rope": self.q[..., ckv:], "k_rope": new[..., ckv:]}
        return backend.forward(q, k, new[..., :ckv], self.layer, batch, **own).view(-1, HEADS, ckv)

    def expected(self) -> torch.Tensor:
        options, found, at = Options(SCALE, causal=True), [], 0
        for m, rows in zip(self.q_lens, self.rows, strict=True):
            k = rows.cpu().double()[:, None]
            found.append(attention(self.q[at : at + m].cpu(), k, k[..., : self.ckv], options).out)
            at += m
        return torch.cat(found)
