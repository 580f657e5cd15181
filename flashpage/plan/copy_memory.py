"""Memory of the copies that a kernel makes before the attention kernel: it ends where the last one begins."""

_ALIGNMENT = 128  # bytes: whole cache lines


def align_down(address: int) -> int:
    return address // _ALIGNMENT * _ALIGNMENT
