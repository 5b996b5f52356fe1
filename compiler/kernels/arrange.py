"""Weights that kernels read in another order than the artifact holds them, rearranged in place once they are on the device
(templates/include/ninferc/codec/arrange.cuh): NVFP4 codes, and the matrices that lie in units (codec/units.cuh)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from artifacts.layouts import layout_of
from compiler.ir.op import Op
from compiler.ir.types import IRError, Kind, Value
from compiler.kernels.spec import DeviceCaps, KernelSpec

FORMAT = "NVFP4"
THREADS, UNITS_THREADS = 256, 1024  # arrange_threads, units_threads in arrange.cuh
# Formats of products: artifact name -> (name in kernels, bytes of 128 columns of a row in the code plane)
UNIT_FORMATS = {
    "BF16": ("bf16", 256),
    "Q4G64_F16S": ("q4g64", 64),
    "Q5G64_F16S": ("q5g64", 64),
    "Q6G64_F16S": ("q6g64", 64),
    "W8G32_F16S": ("w8g32", 128),
    "NVFP4": ("nvfp4", 64),
    "FP8_E4M3FN_ROW_BF16S": ("fp8_row", 128),
}
READERS = frozenset({"linear", "linear_swiglu", "linear_residual", "embed"})  # ops whose kernels know units
SCRATCH = 64 << 20  # bytes of device memory for rearranging, while loading, at most (or one block of rows)
PLANES = {"codes": "w_codes", "words": "w_codes", "base": "w_codes", "high": "w_high", "scales": "w_scales",
          "scale": "w_scales"}  # fmt: skip


def in_units(format: str, n: int, k: int) -> bool:
    """Whether a matrix [n, k] of ``format`` that READERS read lies in units. Told from the shape alone, by kernels and by what
    arranges: gate and up rows are whole bands of 16, and each of two segments of K is whole chunks of 128."""
    return format in UNIT_FORMATS and n % 32 == 0 and k % 256 == 0


def arrange_entry(arch: str) -> str:
    """Name of the kernel for NVFP4 codes in programs for ``arch``."""
    return f"arrange_nvfp4_{arch.replace('_', '')}"


def arrange_spec(caps: DeviceCaps) -> KernelSpec:
    """Arguments: words (in place), pieces of 16 bytes."""
    return KernelSpec(arrange_entry(caps.arch), "arrange_nvfp4.cu.j2", {}, (8 * caps.sms, 1, 1), THREADS, 0,
                      ("words", "pieces"), waits_first=True,
                      reason="once a weight is there: NVFP4 codes in device order")  # fmt: skip


def units_entry(format: str, arch: str) -> str:
    """Name of the kernel that arranges weights of ``format`` in units."""
    return f"arrange_units_{UNIT_FORMATS[format][0]}_{arch.replace('_', '')}"


def units_spec(format: str, caps: DeviceCaps) -> KernelSpec:
    """Arguments: the planes (in place), scratch, rows, chunks of 128 columns. Its grid is the largest one: what is launched
    must not have more blocks than scratch has places (UnitWeight.blocks)."""
    return KernelSpec(units_entry(format, caps.arch), "arrange_units.cu.j2", {"format": UNIT_FORMATS[format][0]},
                      (2 * caps.sms, 1, 1), UNITS_THREADS, 0, ("w_codes", "w_high", "w_scales", "scratch", "rows", "chunks"),
                      waits_first=True, reason="once a weight is there: weights in units of 16 rows x 128 columns")  # fmt: skip


def arranged_weights(values: Iterable[Value]) -> Iterator[tuple[Value, int]]:
    """Weights whose codes have to be rearranged, with the bytes of codes that each begins with."""
    for value in values:
        if value.kind is Kind.WEIGHT and value.source is not None and value.source.format == FORMAT:
            codes = next(p for p in layout_of(FORMAT).planes(FORMAT, value.type.shape) if p.name == "codes")
            assert codes.offset == 0 and codes.nbytes % 16 == 0
            yield value, codes.nbytes


@dataclass(frozen=True)
class UnitWeight:
    """A weight to bring into units. ``planes``: offsets in it by kernel argument; ``block_bytes`` of scratch for each of at
    most ``blocks`` blocks of threads, which take its blocks of rows one by one."""

    value: Value
    format: str
    planes: Mapping[str, int]
    rows: int
    chunks: int
    block_bytes: int

    @property
    def blocks(self) -> int:
        return max(1, min(SCRATCH // self.block_bytes, self.rows // _block_rows(self.format)))

    @property
    def scratch(self) -> int:
        """Bytes for all blocks of threads."""
        return self.blocks * self.block_bytes


def _block_rows(format: str) -> int:
    return 128 if format == FORMAT else 16


def unit_weight(value: Value) -> UnitWeight:
    """How ``value``, a weight in units, is arranged."""
    assert value.source is not None
    format, (n, k) = value.source.format, value.type.shape
    planes = {PLANES[p.name]: p.offset for p in layout_of(format).planes(format, (n, k)) if p.nbytes and p.name in PLANES}
    return UnitWeight(value, format, planes, n, k // 128, _block_rows(format) * UNIT_FORMATS[format][1] * (k // 128))


def unit_weights(values: Mapping[str, Value], ops: Iterable[Op]) -> list[UnitWeight]:
    """The weights in units of a program with these shared values and ops, in the order of ``values``.

    Raises IRError for one that another kind of op reads too."""
    found: dict[str, str] = {}
    others: dict[str, str] = {}
    for op in ops:
        for _, ref in op.refs():
            value = values.get(ref.value)
            if value is None or value.kind is not Kind.WEIGHT or value.source is None or len(value.type.shape) != 2:
                continue
            if op.kind not in READERS:
                others[value.name] = op.kind
            elif in_units(value.source.format, *value.type.shape):
                found[value.name] = op.kind
    if both := sorted(found.keys() & others.keys()):
        raise IRError(f"weight {both[0]}: op {others[both[0]]} reads rows, op {found[both[0]]} units of 16 rows")
    return [unit_weight(value) for name, value in values.items() if name in found]


def arrange_specs(values: Mapping[str, Value], ops: Iterable[Op], caps: DeviceCaps) -> dict[str, KernelSpec]:
    """What a program with these values and ops needs."""
    specs = {units_entry(w.format, caps.arch): units_spec(w.format, caps) for w in unit_weights(values, ops)}
    if any(True for _ in arranged_weights(values.values())):
        specs[arrange_entry(caps.arch)] = arrange_spec(caps)
    return specs
