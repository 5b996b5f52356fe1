"""Kernels that note when they ran, for profiles: the same source with one more argument and one object in the body."""

from __future__ import annotations

import re

from compiler.emit.render import RenderError

SUFFIX = "_stamped"
ARGUMENT = "ninferc_stamp"
STAMP_BYTES = 16  # u64[2]: bits of the earliest start inverted, latest end; zero before the launch


def stamped(entry: str, source: str) -> str:
    """``source`` with its kernel ``entry`` renamed to ``entry + SUFFIX`` and a last parameter: the address of its stamp
    (``templates/include/ninferc/base/stamp.cuh``). Raises RenderError when the source has not exactly one such kernel."""
    head = re.compile(r"NINFERC_KERNEL\(" + re.escape(entry) + r",([^()]*)\)\s*\(([^()]*)\)\s*\{")
    found = list(head.finditer(source))
    if len(found) != 1:
        raise RenderError(f"kernel {entry}: {len(found)} definitions in its source, one is needed to measure it")
    match = found[0]
    opening = (f"#include <ninferc/base/stamp.cuh>\n"
               f"NINFERC_KERNEL({entry}{SUFFIX},{match[1]})({match[2]}, ninferc::u64* {ARGUMENT}) {{\n"
               f"  const ninferc::Stamp {ARGUMENT}_{{{ARGUMENT}}};\n")  # fmt: skip
    return source[: match.start()] + opening + source[match.end() :]
