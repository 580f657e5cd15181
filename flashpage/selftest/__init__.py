"""Checks this machine's kernels against a reference and against its own read and matmul rates
(`flashpage selftest`)."""
