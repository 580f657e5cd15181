"""flashpage as vLLM's attention: `register` is an entry point of the group `vllm.general_plugins`.

`vllm serve MODEL --attention-backend CUSTOM` chooses it. With FLASHPAGE_VLLM=on it also takes the places of FLASH_ATTN
and FLASHINFER, which vLLM chooses by itself, and of CPU_ATTN on the CPU.
"""

from __future__ import annotations

from ....base import env

_CLASSES = {
    "FLASH_ATTN": "InPlaceOfFlashAttn",
    "FLASHINFER": "InPlaceOfFlashInfer",
    "CPU_ATTN": "InPlaceOfCpuAttn",
}


def register() -> None:
    """vLLM calls this in each of its processes. The classes are imported when vLLM chooses them."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    module = f"{__name__}.backend"
    register_backend(AttentionBackendEnum.CUSTOM, f"{module}.FlashpageBackend")
    if env.is_on("FLASHPAGE_VLLM"):
        for name, own in _CLASSES.items():
            register_backend(AttentionBackendEnum[name], f"{module}.{own}")
