"""Render a kernel template. Parameters are integers, booleans or closed identifiers, so artifact text cannot enter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import jinja2

import templates
from compiler.kernels.spec import DeviceCaps, KernelSpec

TEMPLATE_DIR = Path(templates.__file__).resolve().parent
INCLUDE_DIR = TEMPLATE_DIR / "include"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,119}\Z")


class RenderError(Exception):
    """A template cannot be rendered; names the template, its line and the parameter."""


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE_DIR),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _literal(name: str, value: int | str | bool) -> int | str:
    """C++ spelling of a parameter: true/false for booleans, identifiers checked against the closed character set."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return value
    if isinstance(value, str) and _IDENTIFIER.match(value):
        return value
    raise RenderError(f"template parameter {name}={value!r}: only integers, booleans and identifiers are allowed")


def render(template: str, entry: str, params: Mapping[str, int | str | bool]) -> str:
    """CUDA C++ source of one kernel.

    ``template`` is a file name in ``templates/``; ``entry`` the extern "C" name, available as ``entry``. Booleans are
    rendered as ``true``/``false`` (test them in Jinja as ``{% if flag == "true" %}``). Raises RenderError.
    """
    values = {name: _literal(name, value) for name, value in params.items()}
    values["entry"] = _literal("entry", entry)
    try:
        return _environment().get_template(template).render(values)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise RenderError(f"template {template}{f' line {line}' if line else ''}: {error}") from error


def code_paths(caps: DeviceCaps) -> str:
    """What stands in front of a kernel's source so that it takes the code paths of ``caps.code_arch``; else nothing."""
    return f"#define NINFERC_CODE_ARCH {int(caps.code_arch)}\n" if caps.code_arch else ""


def kernel_source(spec: KernelSpec, caps: DeviceCaps) -> str:
    """CUDA C++ source of a kernel for ``caps``. Raises RenderError."""
    return code_paths(caps) + render(spec.template, spec.entry, spec.params)
