"""Layers that cache latent rows (MLA: DeepSeek, Kimi, GLM): prompts attend to expanded keys and values, later tokens to
the rows themselves, with queries and outputs multiplied by the matrix that expands a row.

transformers' modules hand the rows to `cache.update` and its result to `expand_kv`, then the keys and values of that to
the attention function. `expand_kv` of rows from a PagedCache returns them as they are, unless the cache was empty.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import torch
import transformers

from ...base.errors import CapabilityError, RunError
from ...wrappers.append import append_paged_mla_kv_cache
from ...wrappers.plan_arguments import LatentArguments
from . import lists, ragged
from .cache_layer import UNREACHED, PagedLayer, layer_of, tagged
from .call import Layer
from .masks import bits
from .step import Step

_MARK = "_flashpage_expand_kv"


def prepare(config: Any) -> None:
    """Lets the modules of a model with latent rows hand them to the attention function."""
    model = transformers.MODEL_MAPPING.get(type(config), None)
    module = sys.modules.get(getattr(model, "__module__", ""))
    owners = [cls for cls in vars(module).values() if "expand_kv" in getattr(cls, "__dict__", ())] if module else []
    if not owners:
        raise RunError(
            f"{config.model_type} caches latents, which its layers do not expand by a method expand_kv. "
            "Pass no past_key_values: attention then reads the expanded keys and values."
        )
    for owner in owners:
        if not hasattr(owner.expand_kv, _MARK):
            owner.expand_kv = _wrapped(owner.expand_kv)


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def expand_kv(module: Any, latents: torch.Tensor, rotated: torch.Tensor, *args: Any) -> tuple[Any, Any]:
        layer = layer_of(latents)
        if not isinstance(layer, LatentLayer):
            return original(module, latents, rotated, *args)
        return _handed_on(layer, original, module, latents, rotated)

    setattr(expand_kv, _MARK, True)
    return expand_kv


@torch.compiler.disable
def _handed_on(
    layer: LatentLayer, original: Any, module: Any, latents: torch.Tensor, rotated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expanded keys and values of a prompt, and otherwise the rows, with what attention needs of them."""
    if module.config._attn_implementation in ("eager", "sdpa"):
        raise RunError(UNREACHED)
    new = NewRows(layer, module, latents, rotated, is_first=layer.expands(latents.shape[2]))
    key, value = original(module, latents, rotated) if new.is_first else (latents, rotated)
    return tagged(key, new), value


class NewRows(NamedTuple):
    """A layer's new latent rows on their way to the attention function."""

    layer: LatentLayer
    module: Any  # transformers' attention module
    latents: torch.Tensor  # [batch, 1, tokens, kv_lora_rank]
    rotated: torch.Tensor  # [batch, 1, tokens, qk_rope_head_dim]
    is_first: bool  # the cache was empty: keys and values are expanded

    def attend(
        self,
        layer: Layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the rows and attends to all, or to those that `indices` lists; returns [batch, q_length, num_q_heads,
        v_head_dim]."""
        step, length = self.layer.store(layer, self.latents, self.rotated), self.layer.length
        # Lists of all tokens are not read, unless a 4-D mask is over cached rows, which lists serve on a card as well.
        is_listed = indices is not None and (indices.shape[2] < length or (layer.call.has_mask and not self.is_first))
        if self.is_first and not is_listed:
            return ragged.attend(layer, query, key, value)
        up, down = self._expansion(query)
        call: Any = AbsorbedCall.of(layer, query, self.latents.shape[3], self.rotated.shape[3], is_listed)
        nope, rotated = query.split([up.shape[1], call.head_dim_kpe], -1)
        absorbed = torch.cat([torch.einsum("bhtn,hnc->bhtc", nope, up), rotated], -1)
        layer = layer._replace(call=call)
        if is_listed:
            assert indices is not None
            out = lists.run(step, layer, absorbed, self.layer.keys, indices)
        else:
            mask = bits(layer.mask, query.shape[0], query.shape[2], length)
            out = step.run(layer, absorbed, self.layer.keys, mask)
        return torch.einsum("bthc,hvc->bthv", out, down)

    def _expansion(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices that expand a row to keys and to values: [heads, qk_nope_head_dim or v_head_dim, columns]."""
        linear = self.module.kv_b_proj
        weight = getattr(linear, "weight", None)
        if type(linear) is not torch.nn.Linear or linear.bias is not None or weight.dtype != query.dtype:
            raise CapabilityError(
                f"kv_b_proj is {type(linear).__name__} with weights of {getattr(weight, 'dtype', None)}: "
                f"cached latents need a Linear without bias of {query.dtype}; pass no past_key_values."
            )
        rows = weight.view(query.shape[1], -1, weight.shape[1])
        nope = query.shape[3] - self.rotated.shape[3]
        return rows[:, :nope], rows[:, nope:]


class AbsorbedCall(NamedTuple):
    """The options of an absorbed layer that its plan depends on, in place of a Call."""

    num_q_heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    dtype: torch.dtype
    sm_scale: float
    is_causal: bool
    has_mask: bool
    is_listed: bool  # each row lists its tokens

    @staticmethod
    def of(layer: Layer, query: torch.Tensor, ckv: int, kpe: int, is_listed: bool) -> AbsorbedCall:
        call = layer.call
        if call.soft_cap is not None or layer.window_left >= 0:
            raise CapabilityError(
                "a layer with latent rows has a soft cap or a window, which their kernels do not take: "
                "pass no past_key_values."
            )
        scale = query.shape[3] ** -0.5 if call.sm_scale is None else call.sm_scale
        return AbsorbedCall(call.num_q_heads, ckv, kpe, call.dtype, scale, call.is_causal, call.has_mask, is_listed)

    def arguments(self, page_size: int, window_left: int, has_mask: bool) -> LatentArguments:
        """The options of the plan."""
        sizes = (self.num_q_heads, self.head_dim_ckv, self.head_dim_kpe, page_size)
        is_causal = self.is_causal and not self.has_mask and not self.is_listed
        return LatentArguments(
            *sizes, self.sm_scale, is_causal, self.dtype, has_mask=has_mask, is_selected=self.is_listed
        )


class LatentLayer(PagedLayer):
    """One layer's pages of latent rows, [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]."""

    def expands(self, count: int) -> bool:
        """Whether keys and values of `count` new tokens are expanded: the cache was empty."""
        return self.length == count

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._ckv = key_states.shape[3]
        self._take(key_states.new_empty(0, self.cache.table.page_size, self._ckv + value_states.shape[3]))
        self.is_initialized = True

    def _memory(self) -> tuple[torch.Tensor, ...]:
        return (self.keys,)

    def _take(self, *memory: torch.Tensor) -> None:
        self.keys = memory[0]
        self.values = self.keys[..., : self._ckv]

    def _append(self, step: Step, key: torch.Tensor, value: torch.Tensor) -> None:
        caches = (self.keys[..., : self._ckv], self.keys[..., self._ckv :])
        append_paged_mla_kv_cache(key.squeeze(1), value.squeeze(1), *step.places, *caches, *step.page_lists)
