"""The compact text of ``ninferc explain``: phases, folded layers, one line per call and one per reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from compiler.explain.cost import CallReport, phase_report
from compiler.explain.fold import Block, fold, ranges
from compiler.explain.memory import amount, device_memory, total_bytes
from compiler.explain.roofline import Rates, rates
from compiler.program.model import Call, Phase, Program

HEADINGS = ("call", "op", "kernel", "launch", "smem", "regs", "spill", "read", "written", "flops", "us", "slots/w", "edges")


def count(number: float) -> str:
    """A count for people: three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{prefix}"
        number /= 1000
    return f"{number:.3g}P"


def edges(call: Call) -> str:
    """Calls that must have completed, as distances back, and the kind of the edge to the call before."""
    back = sorted(call.index - dep for dep in call.deps)
    shown = ",".join(map(str, back[:4])) + (f",+{len(back) - 4}" if len(back) > 4 else "")
    return (f"-{shown}" if shown else "none") + (" beside" if call.beside else " pdl" if call.programmatic else " full")


def launch(call: Call) -> str:
    grid = "x".join(str(n) for n in call.grid).removesuffix("x1").removesuffix("x1")
    cluster = "x".join(str(n) for n in call.cluster).removesuffix("x1").removesuffix("x1")
    return f"{grid}*{call.block}" + (f" cl{cluster}" if cluster != "1" else "")


def row(item: CallReport) -> tuple[str, ...]:
    """Cells of one call under HEADINGS."""
    resources, call = item.kernel.resources, item.call
    spills = resources.spill_stores + resources.spill_loads
    return (
        str(call.index),
        item.kinds,
        call.entry,
        launch(call),
        amount(call.smem + resources.static_smem) if call.smem + resources.static_smem else "-",
        str(resources.registers) if item.kernel.image else "-",
        f"{spills} B" if spills else "-",
        amount(item.cost.read),
        amount(item.cost.written),
        count(item.cost.flops),
        f"{1e6 * item.seconds:.2f}",
        "-" if item.slots is None else f"{item.slots:.1f}",
        edges(call),
    )


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with columns as wide as their widest cell."""
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]))]
    for cells in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def title(block: Block) -> str:
    if not block.layers:
        return "outside of layers"
    if block.times == 1:
        return f"layer {block.layers[0]}"
    return f"layers {ranges(block.layers)} ({block.times} times)"


def phase_line(phase: Phase, reports: Sequence[CallReport], keys: int) -> str:
    """One line of totals."""
    read, written = sum(r.cost.read for r in reports), sum(r.cost.written for r in reports)
    seconds = sum(r.seconds for r in reports)
    return (f"{phase.name}: {phase.lanes} lane(s) x {phase.width} column(s), {len(phase.calls)} calls, "
            f"{amount(read)} read, {amount(written)} written, {count(sum(r.cost.flops for r in reports))} FLOP, "
            f"at least {1e6 * seconds:.1f} us with {keys} tokens in the cache")  # fmt: skip


def program_lines(program: Program, at: Rates) -> Iterator[str]:
    """What the whole program is."""
    artifact, caps = program.artifact, program.caps
    yield f"target      {caps.arch}, {caps.sms} multiprocessors, {amount(caps.smem_block)} shared memory per block"
    if not caps.bf16_mma:
        yield "note        no matrix instructions for bf16: products run on FP32 units"
    basis = "measured" if at.measured else "from vendor figures"
    yield (f"rates       {at.card}: {at.bandwidth / 1e12:.3g} TB/s ({basis}), {at.flops / 1e12:.4g} TFLOP/s, "
           f"{at.clock / 1e9:.3g} GHz")  # fmt: skip
    yield f"artifact    directory {artifact.directory_sha256[:16]}, {artifact.file_bytes} bytes"
    limits = program.limits
    yield (f"limits      {limits.lanes} lane(s), context {limits.max_context}, prefill chunk {limits.chunk}, "
           f"{limits.pages} KV pages")  # fmt: skip
    for rank, uses in enumerate(device_memory(program)):
        parts = ", ".join(f"{use} {amount(size)}" for use, size in uses.items())
        yield f"device {rank}    {amount(total_bytes(program, rank))}: {parts}"


def explain_text(program: Program, phases: Iterable[str] | None = None, keys: int | None = None) -> Iterator[str]:
    """Lines for a terminal. ``keys``: tokens in the cache that costs assume; default: a full context.

    Edges: distances back to the calls that must have completed; ``pdl`` edges let a kernel start while the one before
    drains, calls ``beside`` the chain of their rank run while it goes on.
    ``slots/w``: instruction slots per weight while the weights stream at full bandwidth.
    """
    at = rates(program.caps)
    depth = program.limits.max_context if keys is None else keys
    yield from program_lines(program, at)
    chosen = list(phases or program.phases)
    for name in chosen:
        phase = program.phases[name]
        reports = phase_report(program, phase, depth, at)
        blocks = fold(reports)
        yield ""
        yield phase_line(phase, reports, depth)
        cells = list(table([HEADINGS, *(row(item) for block in blocks for item in block.calls)]))
        yield cells[0]
        following = iter(cells[1:])
        for block in blocks:
            yield f"-- {title(block)}"
            for _ in block.calls:
                yield next(following)
    yield ""
    yield "why each kernel:"
    used = dict.fromkeys(call.entry for name in chosen for call in program.phases[name].calls)
    yield from table([(entry, program.kernels[entry].spec.reason or "-") for entry in used])
