"""The kernels that are built before they are asked for: which (specs), and how (build)."""
