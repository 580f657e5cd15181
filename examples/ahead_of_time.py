"""Ahead of time: a program writes down the kernels that it used; another process runs from them without a compiler."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import flashpage

PROGRAM = """
import torch, flashpage
q, k, v = torch.ones(1, 4, 128), torch.ones(9, 2, 128), torch.ones(9, 2, 128)
try:
    print(tuple(flashpage.single_prefill_with_kv_cache(q, k, v).shape))
except flashpage.KernelMissingError as error:
    print(type(error).__name__)
"""

if __name__ == "__main__":
    q, k, v = torch.ones(1, 4, 128), torch.ones(9, 2, 128), torch.ones(9, 2, 128)
    flashpage.single_prefill_with_kv_cache(q, k, v)
    with tempfile.TemporaryDirectory() as folder:
        count = flashpage.jit.write_manifest(f"{folder}/used.json")
        print("kernels in the manifest:", count)
        shipped = {"FLASHPAGE_CACHE_DIR": f"{folder}/cache", "FLASHPAGE_JIT": "off"}  # no compiler may start
        for is_built in (False, True):
            if is_built:
                results = flashpage.jit.build_kernels(
                    flashpage.jit.read_manifest(f"{folder}/used.json"), Path(folder, "cache")
                )
                print("built:", len(results))
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM], env=os.environ | shipped, capture_output=True, text=True
            )
            print("with" if is_built else "without", "the folder:", done.stdout.strip())
