"""flashpage as vLLM's attention: `register` is an entry point of the group `vllm.general_plugins`.

`vllm serve MODEL --attention-backend CUSTOM` chooses it, for models with latent rows (MLA) too, whose prompts have a
choice of their own. With FLASHPAGE_VLLM=on it also takes the places of FLASH_ATTN and FLASHINFER, which vLLM chooses by
itself, of TRITON_FLASH_ATTN and TRITON_FLASHINFER, which newer versions choose for images, and of CPU_ATTN on the CPU;
for latent rows those of FLASH_ATTN_MLA, FLASHMLA, CPU_MLA and AMX_MLA, and, where an indexer lists the tokens that are
read, those in sparse_places.py.
"""

from __future__ import annotations

import os
from typing import Any

from ....base import env
from . import sparse_places

_CLASSES = {
    "FLASH_ATTN": "InPlaceOfFlashAttn",
    "FLASHINFER": "InPlaceOfFlashInfer",
    "TRITON_FLASH_ATTN": "InPlaceOfTritonFlashAttn",
    "TRITON_FLASHINFER": "InPlaceOfTritonFlashInfer",
    "CPU_ATTN": "InPlaceOfCpuAttn",
}
_LATENT_CLASSES = {
    "FLASH_ATTN_MLA": "InPlaceOfFlashAttnMLA",
    "FLASHMLA": "InPlaceOfFlashMLA",
    "CPU_MLA": "InPlaceOfCpuMLA",
    "AMX_MLA": "InPlaceOfCpuMLA",
}
_PREFILLS = {"FLASH_ATTN": "FlashpagePrefill", "CPU": "FlashpagePrefillOnCpu"}
_RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


def register() -> None:
    """vLLM calls this in each of its processes. The classes are imported when vLLM chooses them."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _let_ray_copy_variables()
    module = f"{__name__}.backend"
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.chosen.Chosen")
    if env.is_on("FLASHPAGE_VLLM"):
        for name, own in _CLASSES.items():
            if name in AttentionBackendEnum.__members__:
                register_backend(AttentionBackendEnum[name], f"{module}.{own}")
    _register_latent(AttentionBackendEnum, register_backend)


def _let_ray_copy_variables() -> None:
    """Adds FLASHPAGE_ to the prefixes of variables that vLLM copies to Ray's actors. A worker that does not know
    FLASHPAGE_VLLM would take vLLM's own attention and not say so."""
    given = [prefix.strip() for prefix in os.environ.get(_RAY_PREFIXES, "").split(",")]
    wanted = [prefix for prefix in given if prefix and prefix != "FLASHPAGE_"]
    os.environ[_RAY_PREFIXES] = ",".join([*wanted, "FLASHPAGE_"])


def _register_latent(backends: Any, register_backend: Any) -> None:
    """The backends for layers with latent rows (MLA), in releases that have the places."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend

    prefill = f"{__name__}.latent_prefill"
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, f"{prefill}.FlashpagePrefill")
    if not env.is_on("FLASHPAGE_VLLM"):
        return
    for name, own in _LATENT_CLASSES.items():
        if name in backends.__members__:
            register_backend(backends[name], f"{__name__}.latent.{own}")
    for name in sparse_places.CLASSES:
        if name in backends.__members__:
            register_backend(backends[name], f"{__name__}.sparse_places.{name}")
    for name, own in _PREFILLS.items():
        if name in MLAPrefillBackendEnum.__members__:
            register_mla_prefill_backend(MLAPrefillBackendEnum[name], f"{prefill}.{own}")
