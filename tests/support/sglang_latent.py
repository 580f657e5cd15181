"""Steps of SGLang's models with latent rows, without SGLang, and the exact results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_sglang
import torch
from fake_sglang import ForwardMode, RadixAttention
from reference import Options, attention

fake_sglang.install()
CONTEXT, SCALE, HEADS, NOPE, DIM_V = 160, 0.2, 4, 24, 32
# Columns of V, and those of K alone; on a card kernels have the sizes of models.
SIZES = {"cpu": (64, 32, torch.float32), "cuda": (512, 64, torch.bfloat16)}


class LatentScene:
    """Requests that have `kv_lens` tokens with their `q_lens` new ones, in slots of a mixed order."""

    def __init__(
        self, q_lens: list[int], kv_lens: list[int], device: str, page: int = 1, kv_type: torch.dtype | None = None
    ) -> None:
        self.q_lens, self.kv_lens, self.device, self.page = q_lens, kv_lens, device, page
        self.ckv, self.kpe, self.dtype = SIZES[torch.device(device).type]
        self.kv_type, count, columns = kv_type or self.dtype, len(kv_lens), self.ckv + self.kpe
        drawn = self.drawn = torch.Generator().manual_seed(0)
        pages = torch.randperm(count * CONTEXT // page, generator=drawn) + 1  # page 0 belongs to no request
        self.slots = torch.zeros(count + 2, CONTEXT, dtype=torch.int32)
        self.requests = torch.randperm(count + 1, generator=drawn)[:count] + 1
        self.slots[self.requests] = (pages[:, None] * page + torch.arange(page)).view(count, CONTEXT).int()
        slots = (len(pages) + 1) * page
        self.pool = fake_sglang.MLATokenToKVPool(slots, columns, self.ckv, self.kv_type, device)
        self.layer = RadixAttention(0, (HEADS, 1, columns), SCALE, v_head_dim=self.ckv)
        self.expanded = RadixAttention(0, (HEADS, HEADS, NOPE + 24), SCALE, v_head_dim=DIM_V)
        self.rows = [self.draw(n, columns).to(self.kv_type).to(self.dtype) for n in kv_lens]
        self.q = self.draw(sum(q_lens), HEADS, columns)
        for i, (new, all_tokens) in enumerate(zip(q_lens, kv_lens, strict=True)):
            self.pool.set_kv_buffer(self.layer, self._slots_of(i, 0, all_tokens - new), self.rows[i][:-new, None], None)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.drawn).to(self.device, self.dtype)

    def _slots_of(self, i: int, begin: int, end: int) -> torch.Tensor:
        return self.slots[self.requests[i], begin:end].long().to(self.device)

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

    def batch(self, mode: ForwardMode) -> SimpleNamespace:
        """The ForwardBatch of a step."""
        new, lens = self.q_lens, self.kv_lens
        before = [n - m for m, n in zip(new, lens, strict=True)]
        slots = [self._slots_of(i, n - m, n) for i, (m, n) in enumerate(zip(new, lens, strict=True))]
        is_extend = mode in (ForwardMode.EXTEND, ForwardMode.MIXED)

        def on_device(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(lens),
            req_pool_indices=self.requests.to(self.device),
            seq_lens=on_device(before if mode.is_target_verify() else lens),
            out_cache_loc=torch.cat(slots),
            positions=torch.zeros(sum(new), dtype=torch.int64, device=self.device),
            input_ids=None,
            extend_seq_lens=on_device(new),
            extend_seq_lens_cpu=new if is_extend else None,
            extend_prefix_lens_cpu=before if is_extend else None,
            encoder_lens=None,
            spec_info=None,
            mha_one_shot=None,
            mha_return_lse=None,
            attn_attend_prefix_cache=None,
            prefix_chunk_idx=None,
        )

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


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within some roundings of fp32 sums, or two of a 16-bit output, relative to its largest value."""
    limit = 1e-5 if found.dtype == torch.float32 else 2.5 * torch.finfo(found.dtype).eps
    assert not found.isnan().any()
    assert (found.cpu().double() - expected).abs().max().item() < limit * max(1.0, expected.abs().max().item())
