"""How fast the decode kernel's loaders read if nothing is computed: the upper bound of decode.

Kernels with the project's own loaders (load_bench.cu) run the plan of a decode batch in place of attention. A row is
one KV head's K or V of a token; a ring is the shared memory in flight on each SM. `--compile-only` needs no GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from command_line import Parser
from gpu import GpuClock
from workloads import Case, Paged

import flashpage
from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.jit.compilers import find_compiler
from flashpage.jit.targets import Target
from flashpage.kernels import choose, devices
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem

PAGE_SIZES, ROW_BYTES, RINGS = (1, 8, 16, 64), (128, 256, 512), (64, 96, 128, 192)
ENTRY = "flashpage_load_bench"
SOURCE = Path(__file__).with_suffix(".cu")
HOPPER = Target("cuda", 90)


@dataclasses.dataclass(frozen=True)
class Config:
    """One kernel's loader and sizes."""

    loader: str  # boxes | rows
    row_bytes: int
    ring_kib: int

    @property
    def head_dim(self) -> int:
        return self.row_bytes // 2

    @property
    def tokens(self) -> int:
        """Tokens in a slot, as in the decode kernel."""
        options = Options("paged", 1, 1, self.head_dim, self.head_dim, 16, *[DType.BFLOAT16] * 3)
        tile = choose.choose_for_card(Problem(options, 1), devices.H200).spec.tile
        assert tile is not None
        return tile.tile_kv

    @property
    def stages(self) -> int:
        return (self.ring_kib << 10) // (2 * self.row_bytes * self.tokens)

    def source(self) -> str:
        consumers = next(n for n in (8, 6, 4, 2, 1) if self.stages % n == 0)
        values = {"HEAD_DIM": self.head_dim, "TOKENS": self.tokens, "STAGES": self.stages, "CONSUMERS": consumers}
        defines = {**values, "LOADER": self.loader}
        return "".join(f"#define {name} {value}\n" for name, value in defines.items()) + SOURCE.read_text()

    def compile(self) -> bytes:
        compiler = find_compiler(HOPPER)
        if compiler is None:
            raise SystemExit("load_bench needs nvcc or NVRTC")
        with tempfile.TemporaryDirectory(prefix="flashpage-load-bench-") as folder:
            source, binary = Path(folder) / SOURCE.name, Path(folder) / "kernel.cubin"
            source.write_text(self.source())
            done = subprocess.run(compiler.command(source, binary, HOPPER), capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{self}:\n{done.stdout}{done.stderr}")
            return binary.read_bytes()


class Loads:
    """A decode batch of one row width and page size, whose attention kernel is replaced by the loaders."""

    def __init__(self, case: Case) -> None:
        device = torch.device("cuda")
        table = Paged(case.kv_lens, case.page_size, device)
        self.cache = table.cache(case.num_kv_heads, case.head_dim, torch.bfloat16)
        self.bytes = sum(case.kv_lens) * 2 * case.num_kv_heads * case.head_dim * 2
        self.q = torch.zeros(case.batch, case.num_q_heads, case.head_dim, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.q)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self.wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace)
        pages = (table.indptr, table.indices, table.last_page_len)
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
        self.wrapper.plan(*pages, *heads, q_data_type=torch.bfloat16)
        self.wrapper.run(self.q, self.cache, out=self.out)
        self.launch = self.wrapper._attention._local.bound.launches.attentions[0]

    def gb_per_s(self, clock: GpuClock) -> float:
        seconds = clock.seconds(lambda: self.wrapper.run(self.q, self.cache, out=self.out))
        return self.bytes / seconds / 1e9

    def alone(self, clock: GpuClock, image: bytes) -> float:
        """Uses a kernel from `image` while it is timed."""
        handle = native.load().fp_cuda_kernel_load(0, image, len(image), ENTRY.encode())
        if not handle:
            raise SystemExit(native.last_error())
        attention, self.launch.kernel = self.launch.kernel, handle
        try:
            return self.gb_per_s(clock)
        finally:
            torch.cuda.synchronize()
            self.launch.kernel = attention
            native.load().fp_kernel_destroy(handle)


def loader_of(page_size: int) -> str:
    return "boxes" if page_size % 8 == 0 else "rows"


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rings", type=int, nargs="+", default=RINGS, help="KiB; default: %(default)s")
    parser.add_argument("--compile-only", action="store_true")
    arguments = parser.parse_args()
    loaders = dict.fromkeys(loader_of(page_size) for page_size in PAGE_SIZES)
    configs = [Config(*values) for values in itertools.product(loaders, ROW_BYTES, arguments.rings)]
    images = {config: config.compile() for config in configs}
    print(f"{len(images)} kernels compiled", flush=True)
    if arguments.compile_only:
        return 0
    if not torch.cuda.is_available() or not devices.of(torch.device("cuda:0")).has_wgmma:
        print("these loaders need a Hopper GPU: torch finds none here", file=sys.stderr)
        return 1
    clock = GpuClock(arguments.repeats)
    rings = " | ".join(f"{ring} KiB" for ring in arguments.rings)
    print(f"GB/s by ring\n\n| page size | row bytes | {rings} | decode |\n|{' --- |' * (len(arguments.rings) + 3)}")
    for page_size, row_bytes in itertools.product(PAGE_SIZES, ROW_BYTES):
        torch.manual_seed(0)
        case = Case("loads", arguments.batch, 1, arguments.context, head_dim=row_bytes // 2, page_size=page_size)
        loads = Loads(case)
        found = [loads.alone(clock, images[Config(loader_of(page_size), row_bytes, ring)]) for ring in arguments.rings]
        figures = " | ".join(f"{rate:,.0f}" for rate in (*found, loads.gb_per_s(clock)))
        print(f"| {page_size} | {row_bytes} | {figures} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
