"""Reads a cubin (ELF64). Standard library only."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

LAUNCH = "flashpage_launch"  # threads, and dynamic bytes of shared memory; templates/kernel.cu.jinja
_SYMTAB, _NOBITS = 2, 8  # sh_type
# The KiB that the system takes for each CTA, which a card's sizes leave out. From sm_90 on it is also a part of the
# kernel's own section, and there is a section of this name.
_OF_SYSTEM, _SYSTEM_BYTES = ".nv.shared.reserved", 1 << 10


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    kind: int
    flags: int
    data: bytes  # empty if the file holds none (_NOBITS)
    size: int
    link: int
    info: int


@dataclasses.dataclass(frozen=True)
class Symbol:
    name: str
    kind: int
    section: int
    value: int
    size: int


class Elf:
    def __init__(self, image: bytes) -> None:
        if image[:5] != b"\x7fELF\x02":
            raise ValueError(f"not a cubin: it begins with {image[:5]!r}; pass an ELF64 file")
        self._image = image
        offset, size, count, names = *struct.unpack_from("<Q", image, 40), *struct.unpack_from("<HHH", image, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * size) for i in range(count)]
        texts = self._slice(headers[names])
        self.sections = [
            Section(_text(texts, h[0]), h[1], h[2], b"" if h[1] == _NOBITS else self._slice(h), h[5], h[6], h[7])
            for h in headers
        ]
        self.symbols = list(self._read_symbols())

    def _slice(self, header: tuple[int, ...]) -> bytes:
        return self._image[header[4] : header[4] + header[5]]

    def _read_symbols(self) -> Iterator[Symbol]:
        for table in self.sections:
            if table.kind == _SYMTAB:
                texts = self.sections[table.link].data
                for name, info, _, section, value, size in struct.iter_unpack("<IBBHQQ", table.data):
                    yield Symbol(_text(texts, name), info & 15, section, value, size)

    def bytes_of(self, symbol: Symbol) -> bytes:
        return self.sections[symbol.section].data[symbol.value : symbol.value + symbol.size]


def shared_bytes(image: bytes) -> int | None:
    """Shared memory of a kernel's CTA, of fixed and of given size; None if the file is no cubin."""
    try:
        elf = Elf(image)
    except ValueError:
        return None
    launch = next((elf.bytes_of(symbol) for symbol in elf.symbols if symbol.name == LAUNCH), b"")
    given = struct.unpack_from("<2i", launch)[1] if launch else 0
    shared = [section for section in elf.sections if section.name.startswith(".nv.shared.")]
    fixed = [section.size for section in shared if not section.name.startswith(_OF_SYSTEM)]
    begin = _SYSTEM_BYTES if len(fixed) < len(shared) else 0
    return given + sum(max(0, size - begin) for size in fixed)


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()
