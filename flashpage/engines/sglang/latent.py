"""flashpage for SGLang's models with latent rows (MLA).

Each layer has two attentions: `attn_mqa`, absorbed queries over the rows in the cache, and `attn_mha`, which prompts
use where it is faster: SGLang expands the step's own keys and values, then earlier tokens in chunks, and merges the
results.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
from sglang.srt.models.deepseek_common import utils

from ...plan.lengths import starts_of
from ...run.checks import NO_SCALES
from ..plugin.expanded_rows import OWN_TOKENS, ExpandedRows, ExpandedTensors
from ..plugin.joined import joined
from ..plugin.parts import LayerTensors
from .backend import FlashpageBackend
from .groups import Group, Tokens
from .name import NAME
from .planner import NO_BRANCHES, Branches
from .support import check_keywords, check_layer


class FlashpageLatentBackend(FlashpageBackend):
    """Attention of a model runner's layers over latent rows."""

    def __init__(self, runner: Any, branches: Branches = NO_BRANCHES) -> None:
        config = runner.model_config
        self._ckv, self._columns = config.kv_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim
        super().__init__(runner, branches)
        is_batch_invariant = bool(runner.server_args.enable_deterministic_inference)
        self._expanded = ExpandedRows(self._workspaces, "SGLang", is_batch_invariant=is_batch_invariant)
        self._starts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by chunk
        _register_choices()

    def _layers_of(self, runner: Any) -> list[Any]:
        return [layer for layer in super()._layers_of(runner) if self._is_absorbed(layer)]

    def _is_absorbed(self, layer: Any) -> bool:
        return bool(layer.tp_k_head_num == 1 and layer.qk_head_dim == self._columns)

    def _group_of(self, layer: Any) -> Group:
        check_layer(layer, self._ckv)
        return Group(Tokens.ALL, True, self._ckv)

    def _plan(self, forward_batch: Any, is_captured: bool) -> None:
        super()._plan(forward_batch, is_captured)
        self._expanded.begin()
        self._starts.clear()

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Attention of the step's rows, [rows, heads * head_dim of V]. SGLang may give the rotated columns of q and k
        apart, as `q_rope` and `k_rope`."""
        if kwargs:
            check_keywords(layer, kwargs)
        if not self._is_absorbed(layer):
            return self._forward_expanded(q, k, v, layer, forward_batch)
        group, options = self._look_up(layer)
        if save_kv_cache and k is not None:
            self._write_rows(k, k_rope, layer, forward_batch.out_cache_loc)
        heads = layer.tp_q_head_num
        q = q.reshape(len(q), heads, -1)
        if q_rope is not None:
            q = joined((q, q_rope.view(len(q), heads, -1)))
        out = q.new_empty(len(q), heads, self._ckv)
        cache: Any = self._cache(layer)[0].squeeze(2)  # [pages, page, columns]: K and V are one row
        sinks = None if sinks is None else sinks.float()
        return self._run(group, options, LayerTensors(q, None, None, cache, out, NO_SCALES, sinks))

    forward_extend = forward_decode

    def _write_rows(self, k: torch.Tensor, k_rope: torch.Tensor | None, layer: Any, slots: torch.Tensor) -> None:
        """Writes the step's rows to their slots, by SGLang's own functions."""
        k = k.view(len(k), 1, -1)
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, None)
        elif k.is_cuda:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, slots, k, k_rope.view(len(k), 1, -1))
        else:
            rows = torch.cat([k, k_rope.view(len(k), 1, -1)], -1)
            self.token_to_kv_pool.set_kv_buffer(layer, slots, rows, None)

    def _forward_expanded(self, q: torch.Tensor, k: Any, v: Any, layer: Any, batch: Any) -> Any:
        """A prompt's rows over its own tokens, over all tokens of its request (`mha_one_shot`), or over a chunk of
        earlier ones; with LSEs [rows, heads] if SGLang merges."""
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        chunk = batch.prefix_chunk_idx if batch.attn_attend_prefix_cache else OWN_TOKENS
        starts = self._starts.get(chunk)
        if starts is None:
            new = torch.as_tensor(batch.extend_seq_lens_cpu, dtype=torch.int32, device="cpu")
            if chunk != OWN_TOKENS:
                seen = batch.prefix_chunk_seq_lens_cpu[chunk]
            elif batch.mha_one_shot:
                seen = new + torch.as_tensor(batch.extend_prefix_lens_cpu, dtype=torch.int32, device="cpu")
            else:
                seen = new
            starts = self._starts[chunk] = starts_of(new), starts_of(seen)
        rows, tokens = int(starts[0][-1]), int(starts[1][-1])
        q = q.view(-1, heads, layer.qk_head_dim)
        out = q.new_empty(len(q), heads, layer.v_head_dim)
        given = ExpandedTensors(
            q[:rows],
            k.view(-1, kv_heads, layer.qk_head_dim)[:tokens],
            v.view(-1, kv_heads, layer.v_head_dim)[:tokens],
            out[:rows],
        )
        has_lse = bool(batch.mha_return_lse)
        _, lse = self._expanded.run(chunk, starts, given, layer.scaling, has_lse)
        if rows < len(out):
            out[rows:].zero_()
        if not has_lse:
            return out.view(len(out), -1)
        assert lse is not None
        return out, torch.nn.functional.pad(lse, (0, 0, 0, len(out) - rows)) if rows < len(out) else lse


def _register_choices() -> None:
    """SGLang chooses by a backend's name what its models hand to attention: prompts expanded where that is faster, and
    the rotated columns apart, which saves copies."""
    handlers.AttentionBackendRegistry.register(NAME, _choose_method)
    names = utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    if NAME not in names:
        names.append(NAME)


def _choose_method(attention: Any, forward_batch: Any) -> Any:
    """As for FlashAttention 3 on a card: in deterministic mode all rows are absorbed. On the CPU SGLang lacks the
    helpers that expand earlier tokens, so only prompts without earlier tokens are expanded there."""
    is_card = torch.cuda.is_available()
    handler = handlers.handle_attention_fa3 if is_card else handlers.handle_attention_triton
    return handler(attention, forward_batch)
