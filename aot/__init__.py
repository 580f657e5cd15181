"""Builds kernels before a program needs them: `specs` lists the kernels of a wheel, `build` compiles them."""
