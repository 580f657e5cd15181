"""Reads a cubin (ELF64) and describes its machine code independently of function names. Standard library only."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

from aot import elf
from aot.elf import LAUNCH, Symbol

_RELA, _REL = 4, 9  # sh_type
_FUNC = 2  # symbol type
_LAUNCH_NUMBERS = 2  # threads and dynamic shared bytes; only the host uses later numbers
# .nv.info attributes whose payload begins with a symbol's index, or is a list of such indices.
_REGCOUNT, _EXTERNS = 0x2F, 0x0F
_BEGINS_WITH_SYMBOL = {0x0A, 0x11, 0x12, 0x23, _REGCOUNT}  # parameter bank, frame and stack sizes, registers
_INSTRUCTION_BYTES = 16  # since sm_70


@dataclasses.dataclass(frozen=True, order=True)
class Function:
    """A .text section with everything that belongs to it. Equal values are equal machine code."""

    code: bytes
    registers: int
    shared_bytes: int  # static bytes; the dynamic ones are in the launch block
    flags: int  # includes the number of barriers
    constants: tuple[tuple[str, bytes], ...]  # bank, bytes
    info: tuple[tuple[int, bytes], ...]  # attribute, payload
    relocations: tuple[tuple[int, int, str, int], ...]  # offset, type, target, addend


@dataclasses.dataclass(frozen=True)
class Cubin:
    """The machine code of a cubin. Equal values are equal code that is launched in the same way."""

    functions: tuple[Function, ...]
    constants: tuple[tuple[str, bytes], ...]  # banks that all functions share
    data: tuple[bytes, ...]  # initialised variables, without the launch block
    zeroed_bytes: int
    relocations: tuple[tuple[int, int, str, int], ...]
    launch: tuple[int, ...] | None  # (threads, shared bytes); None if the cubin exports none

    @property
    def code_bytes(self) -> int:
        return sum(len(function.code) for function in self.functions)

    @property
    def registers(self) -> int:
        return max((function.registers for function in self.functions), default=0)

    @property
    def shared_bytes(self) -> int:
        return sum(function.shared_bytes for function in self.functions)


class Elf(elf.Elf):
    """With what describes machine code."""

    def info(self, name: str) -> Iterator[tuple[int, bytes]]:
        """Attributes and payloads of .nv.info sections of this name, with symbols' indices in them."""
        for section in self.sections:
            place = 0
            while section.name == name and place < len(section.data):
                form, attribute, value = struct.unpack_from("<BBH", section.data, place)
                end = place + 4 + (value if form == 4 else 0)  # 4: a payload of `value` bytes follows
                yield attribute, section.data[place + (4 if form == 4 else 2) : end]
                place = end

    def relocations(self, section_name: str) -> tuple[tuple[int, int, str, int], ...]:
        found = []
        for section in self.sections:
            if section.kind in (_REL, _RELA) and section.name in (f".rel{section_name}", f".rela{section_name}"):
                layout = "<QQq" if section.kind == _RELA else "<QQ"
                for offset, info, *addend in struct.iter_unpack(layout, section.data):
                    target = self._target(self.symbols[info >> 32])
                    found.append((offset, info & 0xFFFFFFFF, target, addend[0] if addend else 0))
        return tuple(sorted(found))

    def _target(self, symbol: Symbol) -> str:
        """A function by its address, a variable by its contents; only symbols outside of the cubin by name."""
        if not 0 < symbol.section < len(self.sections):
            return f"outside: {symbol.name}"
        section = self.sections[symbol.section]
        if symbol.kind == _FUNC:
            return f"code at {symbol.value}"
        if symbol.name == LAUNCH:
            return "the launch block"
        return f"{'.'.join(section.name.split('.')[:3])} {symbol.size} {self.bytes_of(symbol).hex()}"


def read_cubin(image: bytes) -> Cubin:
    elf = Elf(image)
    functions = tuple(sorted(_functions(elf)))
    names = [section.name.removeprefix(".text.") for section in elf.sections if section.name.startswith(".text.")]
    own = {f".nv.constant{bank}.{name}" for bank in range(10) for name in names}
    shared = [s for s in elf.sections if s.name.startswith(".nv.constant") and s.name not in own]
    initialised = [s for s in elf.symbols if s.size and elf.sections[s.section % 0xFF00].name == ".nv.global.init"]
    launch = next((elf.bytes_of(symbol) for symbol in initialised if symbol.name == LAUNCH), None)
    return Cubin(
        functions=functions,
        constants=tuple((section.name, section.data) for section in shared),
        data=tuple(sorted(elf.bytes_of(symbol) for symbol in initialised if symbol.name != LAUNCH)),
        zeroed_bytes=sum(section.size for section in elf.sections if section.name == ".nv.global"),
        relocations=tuple(entry for section in shared for entry in elf.relocations(section.name)),
        launch=None if launch is None else struct.unpack_from(f"<{_LAUNCH_NUMBERS}i", launch),
    )


def _functions(elf: Elf) -> Iterator[Function]:
    for index, section in enumerate(elf.sections):
        if not section.name.startswith(".text."):
            continue
        name = section.name.removeprefix(".text.")
        here = {number for number, symbol in enumerate(elf.symbols) if symbol.section == index}
        counts = [struct.unpack("<II", p) for attribute, p in elf.info(".nv.info") if attribute == _REGCOUNT]
        banks = [(bank, f".nv.constant{bank}.{name}") for bank in range(10)]
        yield Function(
            code=section.data,
            registers=max((count for symbol, count in counts if symbol in here), default=0),
            shared_bytes=sum(s.size for s in elf.sections if s.name == f".nv.shared.{name}"),
            flags=section.flags,
            constants=tuple((str(bank), s.data) for bank, own in banks for s in elf.sections if s.name == own),
            info=tuple((attribute, _unnamed(attribute, p)) for attribute, p in elf.info(f".nv.info.{name}")),
            relocations=elf.relocations(section.name),
        )


def _unnamed(attribute: int, payload: bytes) -> bytes:
    """The payload without symbols' indices, which follow the order of names."""
    if attribute == _EXTERNS:
        return b"\0" * len(payload)
    return payload[4:] if attribute in _BEGINS_WITH_SYMBOL else payload


def differences(old: Cubin, new: Cubin) -> list[str]:
    """The differences in words; empty for equal machine code."""
    found = [
        f"{field.name.replace('_', ' ')} differ"
        for field in dataclasses.fields(Cubin)
        if field.name not in ("functions", "launch") and getattr(old, field.name) != getattr(new, field.name)
    ]
    if old.launch != new.launch:
        found.append(f"launch block {old.launch} -> {new.launch}")
    if len(old.functions) != len(new.functions):
        return [*found, f"{len(old.functions)} -> {len(new.functions)} functions"]
    for before, after in zip(old.functions, new.functions, strict=True):
        if before.code != after.code:
            found.append(_code_difference(before.code, after.code))
        parts = [field.name for field in dataclasses.fields(Function) if field.name != "code"]
        unlike = [part for part in parts if getattr(before, part) != getattr(after, part)]
        found += [f"{part.replace('_', ' ')} of a function differ" for part in unlike]
    return found


def _code_difference(old: bytes, new: bytes) -> str:
    places = range(0, min(len(old), len(new)), _INSTRUCTION_BYTES)
    differing = [p for p in places if old[p : p + _INSTRUCTION_BYTES] != new[p : p + _INSTRUCTION_BYTES]]
    first = differing[0] if differing else min(len(old), len(new))
    return f"{len(differing)} of {len(places)} instructions in place differ, the first at {first:#x}"
