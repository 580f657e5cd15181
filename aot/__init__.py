"""Builds kernels before a program needs them: `specs` lists the kernels of a wheel, `build` compiles them."""

CPU_TARGETS = {"x86_64": ("avx2", "avx512"), "aarch64": ("neon",)}  # of a machine's wheel
