"""NVRTC as a command line: `python nvrtc.py LIBRARY OPTIONS... SOURCE BINARY`, or `--list` in place of the rest for the
architectures that it knows. It runs as a file and imports no flashpage.

It is a process of its own, so that compiles run in parallel under ninja, can be interrupted, and cannot end the server.
"""

import ctypes
import os
import sys
from ctypes import byref, c_char_p, c_size_t, c_void_p


def compile_source(library: str, options: list[str], name: str, source: bytes) -> tuple[bytes | None, str]:
    """Returns the cubin (or PTX for a compute_ architecture), or None if the compile failed; and the log."""
    # NVRTC loads the builtins library next to it by its bare name, which works if it is loaded already.
    for builtins in sorted(os.listdir(os.path.dirname(library))):
        if builtins.startswith("libnvrtc-builtins.so.") and ".alt." not in builtins:
            ctypes.CDLL(os.path.join(os.path.dirname(library), builtins), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(library)
    program = c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(byref(program), source, name.encode(), 0, None, None))
    arguments = (c_char_p * len(options))(*[option.encode() for option in options])
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    log = _read(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
    if status != 0:
        return None, log or _error_name(nvrtc, status)
    kind = "PTX" if any(option.endswith("=compute_80") for option in options) else "CUBIN"
    return _read(nvrtc, kind, program), log


def _read(nvrtc: ctypes.CDLL, what: str, program: c_void_p) -> bytes:
    """Calls nvrtcGet<what>Size, then nvrtcGet<what>."""
    size = c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _error_name(nvrtc: ctypes.CDLL, status: int) -> str:
    nvrtc.nvrtcGetErrorString.restype = c_char_p
    return nvrtc.nvrtcGetErrorString(status).decode()


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status != 0:
        sys.exit(f"NVRTC: {_error_name(nvrtc, status)}")


def known(library: str) -> list[str]:
    nvrtc, count = ctypes.CDLL(library), ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcGetNumSupportedArchs(byref(count)))
    archs = (ctypes.c_int * count.value)()
    _check(nvrtc, nvrtc.nvrtcGetSupportedArchs(archs))
    return [f"sm_{arch}" for arch in archs]


def main(arguments: list[str]) -> int:
    if arguments[1:] == ["--list"]:
        print(*known(arguments[0]), sep="\n")
        return 0
    library, *options, source, binary = arguments
    with open(source, "rb") as file:
        image, log = compile_source(library, options, source, file.read())
    sys.stderr.write(log)
    if image is None:
        return 1
    with open(binary, "wb") as file:
        file.write(image)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
