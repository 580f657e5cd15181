"""Images in the prompts of multimodal models such as Gemma 3 and PaliGemma, whose tokens see each other in both
directions. A mask reads how far each row of a step sees.

vLLM gives the positions of images as `mm_req_doc_ranges`, (first, last) each. Its backends show a row what causal and
window leave and, in FlexAttention, Triton and FlashAttention 4, the whole range that the row is in. A range is no
longer than the window (vLLM drops longer ones), or the layer cuts it by the window (Gemma 4). So the window hides the
same tokens with images as without, and only the tokens after a row are new: it sees up to the last one of its range.

A request's last row sees all tokens that the request has, with images and without. So decodes need no mask, nor does
text: `take` says from which request on a step needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ....variants.variant import Variant
from ...plugin.group_plans import GroupSizes
from ...plugin.layers import LayerOptions


class _Span(NamedTuple):
    """Consecutive rows of an image."""

    request: int
    begin: int  # rows of the step
    end: int
    last: int  # position of the last token that they see


class ImageRanges:
    """The last token that each row sees, in memory that the plans' variant reads."""

    def __init__(self, sizes: GroupSizes, device: torch.device) -> None:
        rows = sizes.max_rows + sizes.max_requests * sizes.few_rows  # drafters may add theirs
        self._last = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._row_of_zero = torch.zeros(sizes.max_requests, dtype=torch.int32, device=device)
        self.variant = Variant(
            mask="kv_idx <= max(q_idx, last[row_of_zero[b] + q_idx])",
            tensors={"last": self._last, "row_of_zero": self._row_of_zero},
        )

    def take(self, common: Any, lens: torch.Tensor | None) -> int | None:
        """Takes a step's ranges. Returns the first request that needs the mask, and numbers requests from it; None: no
        request does, and nothing was taken.

        Args:
            lens: tokens of each request on the host, exact where a request has rows of its prompt. None: they are
                copied from the device.
        """
        if common.max_query_len <= 1 or not any((common.mm_req_doc_ranges or {}).values()):
            return None
        spans = _spans(common, common.seq_lens.cpu() if lens is None else lens)
        if not spans:
            return None
        requests, first = common.num_reqs, min(span.request for span in spans)
        rows = int(common.query_start_loc_cpu[requests])
        last = torch.full((rows,), -1, dtype=torch.int32, device="cpu", pin_memory=self._last.is_cuda)
        for span in spans:
            last[span.begin : span.end].clamp_(min=span.last)
        self._last[:rows].copy_(last, non_blocking=True)
        # From the lengths on the device: rows of drafts, of which the host knows none, must not read another request's.
        ends, count = common.query_start_loc[first + 1 : requests + 1], requests - first
        torch.sub(ends, common.seq_lens[first:requests], out=self._row_of_zero[:count])
        return first


def _spans(common: Any, lens: torch.Tensor) -> list[_Span]:
    """The rows of a step that see later tokens."""
    found, starts = [], common.query_start_loc_cpu[: common.num_reqs + 1]
    for request in (starts.diff() > 1).nonzero().flatten().tolist():  # decodes, which are most, see nothing new
        ranges = common.mm_req_doc_ranges.get(request)
        if not ranges:
            continue
        begin, end = int(starts[request]), int(starts[request + 1])
        row_of_zero = end - int(lens[request])
        for first, last in ranges:
            span = _Span(request, max(begin, first + row_of_zero), min(end - 1, last + row_of_zero), int(last))
            if span.begin < span.end:
                found.append(span)
    return found


def has_images(config: Any) -> bool:
    """Whether the tokens of an image see each other in the model of vLLM's configuration."""
    return bool(getattr(getattr(config, "model_config", None), "is_mm_prefix_lm", False))


def ranges_of(config: Any, layers: Sequence[Any], sizes: GroupSizes, device: torch.device) -> ImageRanges | None:
    """The ranges of a group of vLLM's layers; None: its rows see no later tokens."""
    if not has_images(config) or any(layer.impl.options.is_encoder for layer in layers):
        return None
    text = config.model_config.hf_text_config
    longest = getattr(text, "sliding_window", None)  # vLLM drops longer ranges
    cuts = [getattr(layer, "mm_prefix_clamp_sliding_window", False) for layer in layers]
    windows = [layer.impl.options.values[True].window_left + 1 for layer in layers]  # 0: all tokens
    # Gemma 4: layers that cut ranges see them, and next to them those of a drafter, which has no word for it.
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        if any(cuts) and not all(windows):
            raise NotImplementedError(
                "flashpage: layers that see images in both directions and others share a KV cache group. "
                "Leave out --disable-hybrid-kv-cache-manager, or choose another attention backend."
            )
        return ImageRanges(sizes, device) if any(cuts) else None
    for window, is_cut in zip(windows, cuts, strict=True):
        if window and not is_cut and (longest is None or longest > window):
            raise NotImplementedError(
                f"flashpage: images of up to {longest or 'any number of'} tokens, whose tokens see each other, do not "
                f"fit into a layer's window of {window}. Choose another attention backend."
            )
    return ImageRanges(sizes, device)


def refusals(config: Any, context_ranks: int, is_batch_invariant: bool) -> list[str]:
    """The reasons why images cannot be served with other parts of vLLM's configuration."""
    return [
        f"flashpage: images whose tokens see each other are not served with {what}"
        for is_unserved, what in (
            (context_ranks > 1, "decode context parallelism"),
            (getattr(config, "diffusion_config", None) is not None, "diffusion models"),
            (getattr(config.parallel_config, "use_ubatching", False), "steps in two halves, as vLLM drops the ranges"),
            (is_batch_invariant, "batch invariance, as masked steps have another kernel"),
        )
        if is_unserved
    ]


def refusal(config: Any, layer: LayerOptions, context_ranks: int, is_batch_invariant: bool) -> str | None:
    """The reason why a layer cannot be served by that configuration; None: it can. The CPU's platform of vLLM asks
    nothing else."""
    if layer.is_encoder or not has_images(config):
        return None
    found = refusals(config, context_ranks, is_batch_invariant)
    if layer.kind.slopes:
        found.append("flashpage: images whose tokens see each other are not served with ALiBi")
    return f"{found[0]}. Choose another attention backend." if found else None
