"""Steps of SGLang without SGLang: its tables and pools, a ForwardBatch for each mode, and the exact results."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import fake_sglang
import torch
from fake_sglang import ForwardMode, KVWriteLoc, RadixAttention
from reference import Options, attention
from sglang_requests import CONTEXT, Requests


@dataclasses.dataclass(frozen=True)
class Form:
    """Heads, types and pages, and the options of a layer."""

    heads: tuple[int, int, int] = (4, 2, 64)  # query heads, KV heads, head_dim
    page: int = 1
    dtype: torch.dtype = torch.bfloat16
    kv_type: torch.dtype | None = None  # None: dtype
    window: int | None = None  # tokens, the row's own included
    chunk: int | None = None  # tokens: rows see only those of their own chunk
    window_pool: bool = False  # the layer's tokens have slots of their own
    soft_cap: float = 0.0
    sinks: bool = False
    encoder: bool = False  # every request has tokens of an encoder before its own
    is_cross: bool = False
    is_encoder_only: bool = False
    server: tuple[tuple[str, Any], ...] = ()  # changes of ServerArgs

    @property
    def layer_id(self) -> int:
        return 1 if self.window_pool else 0


class Scene(Requests):
    """A step of requests, and a layer whose pool has their tokens."""

    def __init__(self, form: Form, q_lens: list[int], kv_lens: list[int], device: str, seed: int = 0) -> None:
        super().__init__(q_lens, kv_lens, form.page, device, seed)
        self.form, drawn = form, self.drawn
        heads, kv_heads, dim = form.heads
        self.encoder_lens = [11 + 3 * i if form.encoder else 0 for i in range(len(kv_lens))]
        self.pool = self._pool(kv_heads, dim)
        scales = self._scales(device) if self.is_fp8 else {}
        self.layer = RadixAttention(
            form.layer_id,
            form.heads,
            0.2,
            logit_cap=form.soft_cap,
            sliding_window_size=-1 if form.window is None else form.window - 1,
            is_cross_attention=form.is_cross,
            use_irope=form.chunk is not None,
            attn_type=fake_sglang.AttentionType["ENCODER_ONLY" if form.is_encoder_only else "DECODER"],
            **scales,
        )
        self.kv = [torch.randn(2, n, kv_heads, dim, generator=drawn).to(device, form.dtype) for n in self._all_lens()]
        self.q = torch.randn(sum(q_lens), heads, dim, generator=drawn).to(device, form.dtype)
        self.sinks = (3 + torch.randn(heads, generator=drawn)).to(device, form.dtype) if form.sinks else None
        for i, (new, all_tokens) in enumerate(zip(q_lens, self._all_lens(), strict=True)):
            self._write(i, 0, all_tokens if form.is_cross else all_tokens - new)

    def _scales(self, device: str) -> dict[str, Any]:
        """Tensors, by which SGLang writes; the numbers are those of weights that were replaced since."""
        tensors = {name: torch.tensor(value, device=device) for name, value in (("k_scale", 0.5), ("v_scale", 2.0))}
        return tensors | {"k_scale_float": 1.0, "v_scale_float": 1.0}

    @property
    def is_fp8(self) -> bool:
        return self.form.kv_type is not None

    def _all_lens(self) -> list[int]:
        """Tokens that the layer's pool holds of each request, from the first one that it sees."""
        return self.encoder_lens if self.form.is_cross else self.kv_lens

    def _pool(self, kv_heads: int, dim: int) -> Any:
        form, size = self.form, self.size
        kind = fake_sglang.SWAKVPool if form.window_pool else fake_sglang.Pool
        pool = kind([size, size], kv_heads, dim, form.kv_type or form.dtype, self.device)
        if form.window_pool:
            order = torch.randperm(size // form.page - 1, generator=self.drawn) + 1
            pages = torch.cat([torch.zeros(1, dtype=torch.long), order])
            mapping = (pages[:, None] * form.page + torch.arange(form.page)).flatten()
            pool.full_to_swa_index_mapping = mapping.to(self.device)
            pool.kv[1][:, : form.page] = 0  # page 0 takes what padding writes
        return pool

    def slots_of(self, i: int, begin: int, end: int) -> torch.Tensor:
        """Slots of a request's tokens; the encoder's stand before the decoder's."""
        first = 0 if self.form.is_cross else self.encoder_lens[i]
        return super().slots_of(i, first + begin, first + end)

    def _write(self, i: int, begin: int, end: int) -> None:
        places = self.slots_of(i, begin, end)
        window = self.pool.translate_loc_from_full_to_swa(places) if self.form.window_pool else None
        k, v = self.kv[i][:, begin:end]
        self.pool.set_kv_buffer(self.layer, KVWriteLoc(places, window), k, v, self.layer.k_scale, self.layer.v_scale)

    # ---------------------------------------------------------------- what SGLang gives

    def runner(self) -> SimpleNamespace:
        form = self.form
        return SimpleNamespace(
            device=self.device,
            dtype=form.dtype,
            kv_cache_dtype=form.kv_type or form.dtype,
            page_size=form.page,
            model=torch.nn.ModuleList([self.layer]),
            model_config=SimpleNamespace(
                context_len=CONTEXT,
                head_dim=form.heads[2],
                is_encoder_decoder=form.encoder,
                attention_chunk_size=form.chunk,
                hf_config=SimpleNamespace(architectures=["Llama4ForCausalLM" if form.chunk else "LlamaForCausalLM"]),
                attention_arch=SimpleNamespace(name="MHA"),
            ),
            req_to_token_pool=SimpleNamespace(req_to_token=self.slots.to(self.device)),
            token_to_kv_pool=self.pool,
            server_args=fake_sglang.server_args(**dict(form.server)),
        )

    def backend(self) -> Any:
        from flashpage.engines.sglang.backend import FlashpageBackend

        return FlashpageBackend(self.runner())

    def batch(self, mode: ForwardMode, mask: torch.Tensor | None = None, **more: Any) -> SimpleNamespace:
        """The ForwardBatch of a step. `mask`: of a tree that is verified."""
        own: dict[str, Any] = {"encoder_out_cache_loc": None}
        if self.form.is_cross:
            own["out_cache_loc"] = None
        if self.form.encoder:
            own["encoder_lens"] = self.on_device(self.encoder_lens)
        if mask is not None:
            own["spec_info"] = SimpleNamespace(custom_mask=mask, draft_token_num=self.q_lens[0])
        return super().batch(mode, **own | more)

    def run(self, backend: Any, batch: Any) -> torch.Tensor:
        """The layer's rows, with K and V of the new tokens, which the backend writes."""
        heads, _kv_heads, dim = self.form.heads
        k = v = None
        if not self.form.is_cross:
            new = [kv[:, len(kv[0]) - m :] for kv, m in zip(self.kv, self.q_lens, strict=True)]
            k, v = (torch.cat([kv[half] for kv in new]) for half in (0, 1))
        own = {} if self.sinks is None else {"sinks": self.sinks}
        out = backend.forward(self.q.flatten(1), k, v, self.layer, batch, **own)
        return out.view(-1, heads, dim)

    # ---------------------------------------------------------------- exact results

    def expected(self, mask: list[torch.Tensor] | None = None) -> torch.Tensor:
        """fp64, over the values that the pool holds. `mask`: rows x tokens of each request."""
        form, layer, found, at = self.form, self.layer, [], 0
        options = Options(
            layer.scaling,
            causal=not (form.is_cross or form.is_encoder_only),
            window_left=layer.sliding_window_size,
            chunk=form.chunk or 0,
            soft_cap=layer.logit_cap,
            sinks=None if self.sinks is None else self.sinks.cpu().float(),
            k_scale=float(layer.k_scale or 1.0),
            v_scale=float(layer.v_scale or 1.0),
        )
        k_all, v_all = (buffer.cpu().float() for buffer in self.pool.get_kv_buffer(layer.layer_id))
        for i, (m, n) in enumerate(zip(self.q_lens, self._all_lens(), strict=True)):
            slots = self.slots_of(i, 0, n)
            if form.window_pool:
                slots = self.pool.translate_loc_from_full_to_swa(slots)
            k, v = (rows[slots.cpu()].double() for rows in (k_all, v_all))
            seen = None if mask is None else mask[i]
            found.append(attention(self.q[at : at + m].cpu(), k, v, options, custom_mask=seen).out)
            at += m
        return torch.cat(found)
