"""From a KernelSpec to the source of one kernel: a jinja2 template of templates/ and the text that modules render for
it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from .. import kernels
from ..base import paths
from ..base.errors import CompileError
from ..kernels.kernel import AttentionKernel
from ..kernels.spec import KernelSpec
from ..variants.source import render as render_variant

if TYPE_CHECKING:
    import jinja2


def source_suffix(spec: KernelSpec) -> str:
    """The suffix by which compilers recognise the language."""
    return ".cpp" if spec.backend == "cpu" else ".cu"


def include_dirs(spec: KernelSpec) -> list[Path]:
    """The folders that a compiler gets as -I: the package's, and the kernel's own if it has one."""
    kernel = kernels.find(spec.kernel)
    own = [Path(os.path.abspath(kernel.include))] if kernel and kernel.include else []  # ninja runs in another folder
    return [paths.include_dir(), *own]


def render(spec: KernelSpec) -> str:
    """The whole translation unit without its includes. CompileError if no kernel has the spec's name, or the kernel has
    no code for the spec's fields."""
    kernel, name = kernels.find(spec.kernel), f"kernel{source_suffix(spec)}.jinja"
    if kernel is None:
        known = ", ".join(found.name for found in (*kernels.ATTENTION, *kernels.OTHERS))
        raise CompileError(f"kernel {spec.kernel!r} of {spec.name} is not known: flashpage/kernels has {known}")
    if isinstance(kernel, AttentionKernel) and spec.tile is None:
        raise CompileError(f"spec {spec.name} has no tile: {kernel.name} needs one, as plans choose it.")
    template = _environment(paths.templates_dir()).get_template(name)
    variant = render_variant(spec.variant) if kernel.has_variant else ""
    try:
        attributes, sources, traits = kernel.attributes(spec), kernel.sources(spec), kernel.traits(spec)
    except KeyError as error:  # an element type that the kernel's instructions do not have
        raise CompileError(f"{kernel.name} has no code for {error} in spec {spec.name}") from error
    return template.render(
        spec=spec,
        kernel=kernel,
        attributes=attributes,
        sources=f"{variant}\n{sources}".strip(),
        includes="\n".join(f'#include "{header}"' for header in spec.format_headers),
        traits="\n".join(f"  {line}" for line in traits),
        parameters=", ".join(f"const __grid_constant__ {kind} {name}" for kind, name in kernel.parameters),
        arguments=", ".join(name for _, name in kernel.parameters),
    )


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    import jinja2  # imported here, because a cache hit renders nothing

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
