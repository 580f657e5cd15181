"""From a KernelSpec to the source of one kernel: a jinja2 template of templates/, and what modules write for it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import paths
from ..base.errors import CompileError
from ..kernels.spec import KernelSpec
from ..kernels.wgmma_source import render as render_products
from ..variants.source import render as render_variant

if TYPE_CHECKING:
    import jinja2


def source_suffix(spec: KernelSpec) -> str:
    """What compilers tell the language by."""
    return ".cpp" if spec.backend == "cpu" else ".cu"


def render(spec: KernelSpec) -> str:
    """The whole translation unit, less what it includes; CompileError where the spec has no template."""
    name = f"{spec.kernel}{source_suffix(spec)}.jinja"
    if not (paths.templates_dir() / name).is_file():
        raise CompileError(f"kernel {spec.name} has no template: {paths.templates_dir()} holds no {name}")
    template = _environment(paths.templates_dir()).get_template(name)
    return template.render(spec=spec, variant_source=render_variant(spec.variant), products=render_products(spec))


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    import jinja2  # here: a hit renders nothing

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
