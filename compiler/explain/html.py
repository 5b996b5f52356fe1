"""One self-contained page: the schedule of each phase as an arc diagram (inline SVG), its folded table, its reasons.

No script, no external resource. Every text is escaped; names come from our own compiler except the artifact's ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from compiler.explain.cost import CallReport, phase_report
from compiler.explain.fold import fold
from compiler.explain.memory import amount
from compiler.explain.roofline import rates
from compiler.explain.text import HEADINGS, count, edges, launch, phase_line, program_lines, row, title
from compiler.program.model import Phase, Program

STEP, LEFT, BAR = 16, 220, 260  # pixels: height of a call, room for the arcs, width of the longest time bar
MAX_ARCS_PER_CALL = 12
_COLOURS = {"linear": "#3b6fb6", "attention": "#b6553b", "gdn": "#3f8f5f", "conv": "#5fa98a", "norm": "#8a7fb0",
            "control": "#888888", "sample": "#b09a3b"}  # fmt: skip
_CONTROL = ("begin", "advance", "embed", "select_last")

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1280px; padding: 0 1em; color: #1c1c1c; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin-top: 2em; }
pre, table, text { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; }
table { border-collapse: collapse; } td, th { padding: 1px 8px; text-align: left; white-space: nowrap; }
th { border-bottom: 1px solid #999; } tr.layer td { border-top: 1px solid #ddd; font-weight: 600; }
.wide { overflow-x: auto; } svg { display: block; } details { margin: .6em 0; }
.arc { fill: none; stroke: #777; stroke-opacity: .35; } .arc.far { stroke: #b6553b; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd; } text { fill: #ddd; } }
"""


def colour(kind: str) -> str:
    """Colour of a call by what its first op does."""
    for key in _COLOURS:
        if key in kind:
            return _COLOURS[key]
    return _COLOURS["control"] if kind in _CONTROL else "#999999"


def _arc(before: int, after: int) -> str:
    """A half ellipse on the left of the column, from one call down to a later one; far ones reach further out."""
    y1, y2, span = STEP * before + STEP // 2, STEP * after + STEP // 2, after - before
    reach = min(LEFT - 12, 10 + 4 * span)
    far = " far" if span > 40 else ""
    return f'<path class="arc{far}" d="M{LEFT} {y1} C{LEFT - reach} {y1} {LEFT - reach} {y2} {LEFT} {y2}"/>'


def _tooltip(item: CallReport) -> str:
    call, resources = item.call, item.kernel.resources
    return "\n".join(
        (
            f"{call.index}: {item.kinds}" + (f", layer {item.layer}" if item.layer >= 0 else ""),
            call.entry,
            f"launch {launch(call)}, shared memory {amount(call.smem + resources.static_smem)}",
            f"registers {resources.registers}, spills {resources.spill_stores + resources.spill_loads} B",
            f"{amount(item.cost.read)} read, {amount(item.cost.written)} written, {count(item.cost.flops)} FLOP",
            f"at least {1e6 * item.seconds:.2f} us",
            f"edges {edges(call)}",
            item.kernel.spec.reason or "",
        )
    )


def graph_svg(phase: Phase, reports: Sequence[CallReport]) -> Iterator[str]:
    """The schedule from top to bottom; arcs are dependencies, bars the least time of each call."""
    height, width = STEP * len(reports) + 4, LEFT + BAR + 620
    longest = max((item.seconds for item in reports), default=1.0)
    yield f'<svg width="{width}" height="{height}" role="img" aria-label="calls of {escape(phase.name)}">'
    for item in reports:
        for before in sorted(item.call.deps, reverse=True)[:MAX_ARCS_PER_CALL]:
            yield _arc(before, item.call.index)
    for item in reports:
        y = STEP * item.call.index
        bar = max(1.0, BAR * item.seconds / longest)
        layer = f"L{item.layer} " if item.layer >= 0 else ""
        yield (f'<g><title>{escape(_tooltip(item))}</title>'
               f'<circle cx="{LEFT}" cy="{y + STEP // 2}" r="4" fill="{colour(item.kinds)}"/>'
               f'<rect x="{LEFT + 10}" y="{y + 3}" width="{bar:.1f}" height="{STEP - 6}" fill="{colour(item.kinds)}"/>'
               f'<text x="{LEFT + BAR + 20}" y="{y + STEP - 4}">{escape(layer + item.kinds)}</text>'
               f'<text x="{LEFT + BAR + 210}" y="{y + STEP - 4}">{escape(item.call.entry)}</text></g>')  # fmt: skip
    yield "</svg>"


def _table(reports: Sequence[CallReport]) -> Iterator[str]:
    yield '<div class="wide"><table><tr>' + "".join(f"<th>{escape(name)}</th>" for name in HEADINGS) + "</tr>"
    for block in fold(reports):
        yield f'<tr class="layer"><td colspan="{len(HEADINGS)}">{escape(title(block))}</td></tr>'
        for item in block.calls:
            yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row(item)) + "</tr>"
    yield "</table></div>"


def explain_html(program: Program, phases: Iterable[str] | None = None, keys: int | None = None) -> Iterator[str]:
    """The page, piece by piece. ``keys``: tokens in the cache that costs assume; default: a full context."""
    at = rates(program.caps)
    depth = program.limits.max_context if keys is None else keys
    name = program.artifact.model_id or "program"
    yield ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
           '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'">'
           f"<title>{escape(name)} for {escape(program.caps.arch)}</title><style>{STYLE}</style></head><body>\n")  # fmt: skip
    yield f"<h1>{escape(name)} {escape(program.artifact.weights_id)} for {escape(program.caps.arch)}</h1>\n<pre>"
    yield escape("\n".join(program_lines(program, at))) + "</pre>\n"
    yield ("<p>Arcs join a call with the calls that must have completed; bars are the least time the card allows; "
           "point at a call for its details. Edges: distances back; pdl lets a kernel start while the one before drains; "
           "beside the chain of its rank it runs while others do. "
           "slots/w: instruction slots per weight while the weights stream at full bandwidth.</p>\n")  # fmt: skip
    chosen = list(phases or program.phases)
    for label in chosen:
        phase = program.phases[label]
        reports = phase_report(program, phase, depth, at)
        yield f"<h2>{escape(label)}</h2>\n<p>{escape(phase_line(phase, reports, depth))}</p>\n"
        yield '<details open><summary>graph</summary><div class="wide">'
        yield from graph_svg(phase, reports)
        yield "</div></details>\n<details><summary>calls, repeated layers folded</summary>"
        yield from _table(reports)
        yield "</details>\n"
    yield "<h2>Why each kernel</h2>\n<div class=\"wide\"><table>"
    for entry in dict.fromkeys(call.entry for label in chosen for call in program.phases[label].calls):
        yield f"<tr><td>{escape(entry)}</td><td>{escape(program.kernels[entry].spec.reason or '-')}</td></tr>"
    yield "</table></div>\n</body></html>\n"
