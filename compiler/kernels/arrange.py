"""Weights that kernels read in another order than the artifact holds them: NVFP4 codes, rearranged in place once they are
on the device (templates/include/ninferc/codec/arrange.cuh)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from artifacts.layouts import layout_of
from compiler.ir.types import Kind, Value
from compiler.kernels.spec import DeviceCaps, KernelSpec

FORMAT = "NVFP4"
THREADS = 256


def arrange_entry(arch: str) -> str:
    """Name of the kernel in programs for ``arch``."""
    return f"arrange_nvfp4_{arch.replace('_', '')}"


def arrange_spec(caps: DeviceCaps) -> KernelSpec:
    """Arguments: words (in place), pieces of 16 bytes."""
    return KernelSpec(arrange_entry(caps.arch), "arrange_nvfp4.cu.j2", {}, (8 * caps.sms, 1, 1), THREADS, 0,
                      ("words", "pieces"), waits_first=True,
                      reason="once after loading: NVFP4 codes in device order")  # fmt: skip


def arranged_weights(values: Iterable[Value]) -> Iterator[tuple[Value, int]]:
    """Weights that have to be rearranged, with the bytes of codes that each begins with."""
    for value in values:
        if value.kind is Kind.WEIGHT and value.source is not None and value.source.format == FORMAT:
            codes = next(p for p in layout_of(FORMAT).planes(FORMAT, value.type.shape) if p.name == "codes")
            assert codes.offset == 0 and codes.nbytes % 16 == 0
            yield value, codes.nbytes


def arrange_specs(values: Mapping[str, Value], caps: DeviceCaps) -> dict[str, KernelSpec]:
    """What a program with these values needs."""
    return {arrange_entry(caps.arch): arrange_spec(caps)} if any(True for _ in arranged_weights(values.values())) else {}
