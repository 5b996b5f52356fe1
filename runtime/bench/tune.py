"""Choose tiles of products by measuring whole steps.

A product that is fast alone may be slow in a step, where its blocks share the device with the end of the kernel before
and the start of the next. So each candidate is timed inside the graph of a decode phase, product by product, each kept
when it makes the step faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from compiler.emit.cache import Job, compile_all
from compiler.emit.render import kernel_source
from compiler.ir.op import ref_type
from compiler.kernels.linear_columns import Product, Tile, candidates, choose, product_of, spec_of
from compiler.kernels.spec import KernelSpec
from compiler.program.model import Arg, Call, KernelImage, Phase
from runtime.bench.measure import Bench
from runtime.cuda.modules import Modules

GAIN = 0.9985  # a tile must make the step at least this much faster: less is noise


@dataclass
class Choice:
    """A product of a phase, the calls that compute it and the tile in use."""

    product: Product
    calls: list[int]
    tile: Tile


class Tuner:
    """Tunes decode phases of a loaded backend. ``log`` gets one line per product."""

    def __init__(self, bench: Bench, log: Callable[[str], None]) -> None:
        self._bench, self._backend, self._log = bench, bench.backend, log
        self._program = bench.backend.program
        self._modules = Modules({}, [])
        self._modules.kernels |= bench.backend.modules.kernels
        self._scratch: dict[str, int] = {}

    def _products(self, phase: Phase) -> list[Choice]:
        found: dict[str, Choice] = {}
        for call in phase.calls:
            op = call.ops[0]
            if len(call.ops) != 1 or not op.kind.startswith("linear"):
                continue
            values = {name: self._program.value(phase, ref.value) for name, ref in op.refs()}
            types = {name: ref_type(ref, values[name]) for name, ref in op.refs()}
            source = values["w"].source
            assert source is not None
            product = product_of(op, types, source.format)
            choice = found.setdefault(product.key, Choice(product, [], choose(product, self._program.caps)))
            choice.calls.append(call.index)
        return list(found.values())

    def _variants(self, product: Product, count: int) -> Iterator[Tile]:
        ranked = [tile for tile in candidates(product, self._program.caps)]
        single = [tile for tile in ranked if tile.blocks_per_sm == 1]
        fresh = [tile for tile in ranked if tile.blocks_per_sm == 0]
        seen: set[Tile] = set()
        for tile in itertools.chain(ranked[: count // 2], single[: count // 4], fresh[: count // 4]):
            if tile not in seen:
                seen.add(tile)
                yield tile

    def _prepare(self, specs: list[KernelSpec]) -> None:
        """Compile and load kernels under names of their own."""
        missing = [spec for spec in specs if spec.entry not in self._modules.kernels]
        sources = {spec.entry: kernel_source(spec, self._program.caps) for spec in missing}
        arch = self._program.caps.arch
        cubins = compile_all([Job(entry, source, arch) for entry, source in sources.items()])
        images = {s.entry: KernelImage(s, sources[s.entry], cubins[s.entry].image, cubins[s.entry].resources) for s in missing}
        if images:
            self._modules.kernels |= Modules(images, self._backend.devices).kernels

    def _spec(self, product: Product, tile: Tile) -> KernelSpec:
        spec = spec_of(product, tile, self._program.caps)
        name = "_".join(str(value) for value in asdict(tile).values())
        return replace(spec, entry=f"{spec.entry}_{name}".replace("True", "y").replace("False", "n"))

    def _call(self, call: Call, spec: KernelSpec) -> Call:
        known = {arg.name: arg for arg in call.args}
        args = []
        for name in spec.args:
            if name in spec.scratch:
                key = f"{call.index}.{name}.{spec.scratch[name]}" if name in spec.zeroed else f"{name}.{spec.scratch[name]}"
                if key not in self._scratch:
                    self._scratch[key] = self._backend.devices[call.rank].allocate(spec.scratch[name], "tuning scratch")
                args.append(Arg(name, "pointer", "absolute", self._scratch[key]))
            elif name in spec.scalars:
                number = spec.scalars[name]
                args.append(Arg(name, "float" if isinstance(number, float) else "int", number=number))
            else:
                args.append(known[name])
        return replace(call, entry=spec.entry, args=tuple(args), grid=spec.grid, block=spec.block, smem=spec.smem)

    def _address(self, arg: Arg) -> int:
        return arg.offset if arg.region == "absolute" else self._backend.argument_address(arg)

    def _time(self, phase: Phase, specs: dict[int, KernelSpec], context: int, steps: int) -> float:
        calls = tuple(self._call(c, specs[c.index]) if c.index in specs else c for c in phase.calls)
        return self._bench.replay(replace(phase, calls=calls), self._modules, self._address, context, steps)

    def run(self, lanes: int, width: int, context: int, variants: int = 24, steps: int = 12) -> dict[str, dict[str, Any]]:
        """Tiles by product key for one phase."""
        phase = self._program.phases[f"decode{lanes}x{width}"]
        choices = self._products(phase)
        tried = {c.product.key: [c.tile, *(t for t in self._variants(c.product, variants) if t != c.tile)] for c in choices}
        for choice in choices:
            extra = [replace(t, release=r) for t in tried[choice.product.key][:6] for r in ("early", "late") if t.release != r]
            tried[choice.product.key] += [tile for tile in extra if tile not in tried[choice.product.key]]
        self._prepare([self._spec(c.product, tile) for c in choices for tile in tried[c.product.key]])
        specs: dict[int, KernelSpec] = {}
        best = self._time(phase, specs, context, steps)
        first = best
        for choice in sorted(choices, key=lambda c: -len(c.calls) * c.product.n * c.product.k):
            for tile in tried[choice.product.key]:
                trial = specs | {index: self._spec(choice.product, tile) for index in choice.calls}
                seconds = self._time(phase, trial, context, steps)
                if seconds < best * GAIN:
                    best, specs, choice.tile = seconds, trial, tile
            self._log(f"{choice.product.key}: {choice.tile} step {best * 1e3:.3f} ms")
        self._log(f"decode{lanes}x{width}: step {first * 1e3:.3f} ms -> {best * 1e3:.3f} ms")
        return {choice.product.key: asdict(choice.tile) for choice in choices}
