"""A step profile for people: aligned rows for a terminal, and one self-contained page with the timeline drawn.

The page holds no script and no external resource, and a policy that forbids both. Every text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from compiler.explain.html import STYLE, colour
from compiler.explain.text import table
from runtime.bench.profile import KernelProfile, Span, StepProfile

KERNEL_HEADINGS = ("kernel", "op", "calls", "isolated us", "in graph us", "overlap us", "MB", "GB/s", "share")
OP_HEADINGS = ("op", "calls", "isolated us", "in graph us", "overlap us", "MB", "GB/s", "share")
WIDTH, ROW, LEFT, AXIS = 1180, 14, 60, 16  # pixels: of a line of the timeline, a row, room for names, the axis
LINE = 400e-6  # seconds of one line: the shortest kernels are then still some pixels wide
TICKS = 8
SHORTEST = 1e-9  # seconds: less is rounding

PAGE_STYLE = """
.bar { stroke: none; } .wait { fill-opacity: .3; } .axis { stroke: #999; stroke-width: 1; } .key { display: inline-block;
width: 1em; height: 1em; margin: 0 .3em 0 1em; vertical-align: -.15em; } svg { margin-bottom: .8em; }
td.n, th.n { text-align: right; }
"""


def _cells(rows: Sequence[KernelProfile], seconds: float) -> tuple[str, ...]:
    """Calls, per-call times, bytes and the rate and share of kernels taken together."""
    calls = sum(row.calls for row in rows)
    alone, inside, nbytes = (sum(getattr(row, name) for row in rows) for name in ("isolated", "in_graph", "nbytes"))
    rate = f"{nbytes / inside / 1e9:.0f}" if inside > 0 and nbytes else "-"
    times = (f"{t / calls * 1e6:.2f}" for t in (alone, inside, alone - inside))
    return (str(calls), *times, f"{nbytes / calls / 1e6:.2f}", rate, f"{inside / seconds:.1%}")


def kernel_rows(profile: StepProfile) -> Iterator[tuple[str, ...]]:
    """Cells under KERNEL_HEADINGS; times and MB are per call, the share is that of all calls in the step."""
    for row in profile.kernels:
        yield (row.entry, row.kinds, *_cells([row], profile.seconds))


def op_rows(profile: StepProfile) -> Iterator[tuple[str, ...]]:
    """Cells under OP_HEADINGS, largest share first."""
    groups: dict[str, list[KernelProfile]] = {}
    for row in profile.kernels:
        groups.setdefault(row.kinds, []).append(row)
    for kinds, rows in sorted(groups.items(), key=lambda item: -sum(row.in_graph for row in item[1])):
        yield (kinds, *_cells(rows, profile.seconds))


def summary(profile: StepProfile) -> str:
    """One line: the step, what the kernels account for, and what noting the times cost."""
    covered = sum(row.in_graph for row in profile.kernels)
    return (f"{profile.phase} of {profile.model} at {profile.context} tokens: step {profile.seconds * 1e3:.3f} ms, kernels "
            f"account for {covered / profile.seconds:.1%}, the rest overlaps; {profile.stamped_seconds * 1e3:.3f} ms while "
            "noting times")  # fmt: skip


def profile_text(profile: StepProfile) -> Iterator[str]:
    """Lines for a terminal."""
    yield from table([KERNEL_HEADINGS, *kernel_rows(profile)])
    yield ""
    yield from table([OP_HEADINGS, *op_rows(profile)])
    yield ""
    yield summary(profile)


def _tooltip(span: Span, ready: float) -> str:
    work = span.end - ready
    rate = f", {span.nbytes / work / 1e9:.0f} GB/s" if work > 0 and span.nbytes else ""
    return "\n".join((
        f"{span.index}: {span.kinds}" + (f", layer {span.layer}" if span.layer >= 0 else ""),
        span.entry,
        f"starts {span.start * 1e6:.2f} us, ends {span.end * 1e6:.2f} us",
        f"{(ready - span.start) * 1e6:.2f} us beside the node before, {work * 1e6:.2f} us after it",
        f"{span.nbytes / 1e6:.2f} MB{rate}",
    ))  # fmt: skip


def _rect(kind: str, x: float, width: float, y: float, fill: str) -> str:
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{max(width, .5):.2f}" height="{ROW - 2}" fill="{fill}"/>'


def _line(profile: StepProfile, begin: float, end: float) -> Iterator[str]:
    """The nodes of every device between two times. Neighbours stand in two rows, so that overlap is seen; the pale part of
    a bar is the time before the node in front of it has ended."""
    ranks, scale = len(profile.devices), (WIDTH - LEFT) / (end - begin)
    height = ranks * (2 * ROW + 8) + AXIS
    yield f'<svg width="{WIDTH}" height="{height}" role="img" aria-label="{begin * 1e6:.0f} to {end * 1e6:.0f} us">'
    for tick in range(TICKS + 1):
        x = LEFT + (WIDTH - LEFT) * tick / TICKS
        anchor = "start" if tick == 0 else "end" if tick == TICKS else "middle"
        yield (f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - AXIS}" stroke-opacity=".25"/>'
               f'<text x="{x:.1f}" y="{height - 3}" text-anchor="{anchor}">'
               f"{(begin + (end - begin) * tick / TICKS) * 1e6:.0f}</text>")  # fmt: skip
    for rank in range(ranks):
        top, before = rank * (2 * ROW + 8), 0.0
        yield f'<text x="0" y="{top + ROW + 4}">device {rank}</text>'
        for position, span in enumerate(s for s in profile.spans if s.rank == rank):
            ready = min(max(span.start, before), span.end)
            before = max(before, span.end)
            if span.end < begin or span.start > end:
                continue
            y, fill = top + ROW * (position % 2), colour(span.kinds)
            yield f"<g><title>{escape(_tooltip(span, ready))}</title>"
            for kind, start, stop in (("bar wait", span.start, ready), ("bar", ready, span.end)):
                left, right = max(start, begin), min(stop, end)
                if right - left > SHORTEST:
                    yield _rect(kind, LEFT + (left - begin) * scale, (right - left) * scale, y, fill)
            yield "</g>"
    yield "</svg>"


def _table(headings: Sequence[str], rows: Iterator[tuple[str, ...]], texts: int) -> Iterator[str]:
    mark = ["" if i < texts else ' class="n"' for i in range(len(headings))]
    yield '<div class="wide"><table><tr>'
    yield "".join(f"<th{m}>{escape(name)}</th>" for m, name in zip(mark, headings, strict=True)) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td{m}>{escape(cell)}</td>" for m, cell in zip(mark, row, strict=True)) + "</tr>"
    yield "</table></div>"


def profile_html(profile: StepProfile) -> Iterator[str]:
    """The page, piece by piece."""
    total = max((span.end for span in profile.spans), default=0.0) or 1e-6
    yield ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
           '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'">'
           f"<title>{escape(profile.model)} {escape(profile.phase)}</title><style>{STYLE}{PAGE_STYLE}</style></head><body>\n")
    yield f"<h1>{escape(profile.model)}: one step of {profile.lanes} lane(s) × {profile.width} column(s)</h1>\n"
    yield f"<p>{escape(summary(profile))}</p>\n<ul>"
    yield "".join(f"<li>device {rank}: {escape(name)}</li>" for rank, name in enumerate(profile.devices)) + "</ul>\n"
    yield "<p>" + "".join(f'<span class="key" style="background:{colour(kinds)}"></span>{escape(kinds)}'
                          for kinds in dict.fromkeys(span.kinds for span in profile.spans)) + "</p>\n"  # fmt: skip
    yield ("<h2>Timeline</h2>\n<p>Microseconds since the first node started. Every node from its first block's start to its "
           "last warp's end, median of several replays whose kernels note these times; pale: started, while the node before "
           "still ran. Point at a bar for its numbers.")  # fmt: skip
    if len(profile.devices) > 1:
        yield " The devices' clocks are brought together at the exchanges, which end on both at the same time."
    yield '</p>\n<div class="wide">'
    lines = max(1, -(-int(total * 1e9) // int(LINE * 1e9)))
    for line in range(lines):
        yield from _line(profile, line * min(LINE, total), min(LINE, total) * (line + 1))
    yield "</div>\n<h2>Kernels</h2>\n"
    yield ("<p>Isolated: a graph of this kernel's calls alone; in graph: what the step loses without them; overlap: the "
           "difference. Times and MB per call, share of the step by all calls.</p>\n")  # fmt: skip
    yield from _table(KERNEL_HEADINGS, kernel_rows(profile), 2)
    yield "\n<h2>Ops</h2>\n"
    yield from _table(OP_HEADINGS, op_rows(profile), 1)
    yield "\n</body></html>\n"
