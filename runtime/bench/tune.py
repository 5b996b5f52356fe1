"""Choose tiles of products by measuring whole steps.

A product that is fast alone may be slow in a step, where its blocks share the device with the end of the kernel before
and the start of the next. So each candidate is timed inside the graph of a decode phase, product by product, each kept
when it makes the step faster. Of two ranks both take a candidate at once; a product that also sends what it finishes stands
in the profile under the name of the one that does not, since the work is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from compiler.emit.cache import Job, compile_all
from compiler.emit.render import kernel_source
from compiler.ir.op import ref_type
from compiler.kernels.linear_columns import (
    Product,
    Tile,
    candidates,
    choose,
    claiming,
    product_of,
    spec_of,
    teams_of,
    tiles_of,
    turned,
)
from compiler.kernels.spec import DeviceCaps, KernelSpec
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
    caps: DeviceCaps

    @property
    def key(self) -> str:
        return self.product.key

    @property
    def weight(self) -> int:
        return self.product.n * self.product.k

    def spec(self, tile: Tile) -> KernelSpec:
        name = "_".join(str(value) for value in asdict(tile).values()).replace("True", "y").replace("False", "n")
        spec = spec_of(self.product, tile, self.caps)
        return replace(spec, entry=f"{spec.entry}_{name}")

    def rounds(self, count: int) -> Iterator[list[Tile]]:
        """Tiles to measure: shapes, dealt beforehand and claimed, then for the best of them (``tile`` by then) when dependents
        may start, whether weights leave L2 first, how much of the ring is filled early."""
        ranked = list(candidates(self.product, self.caps))
        single = [tile for tile in ranked if tile.blocks_per_sm == 1]
        fresh = [tile for tile in ranked if tile.blocks_per_sm == 0]
        best = list(dict.fromkeys(itertools.chain(ranked[: count // 3], single[: count // 6], fresh[: count // 6])))
        rounds = {tile: tiles_of(self.product, tile) // teams_of(self.product, tile) for tile in single[: 2 * count]}
        finest = sorted(rounds, key=lambda tile: -rounds[tile])
        best += [tile for tile in ranked if tile.warps_r * tile.warps_k > 20 and tile.blocks_per_sm < 2][: count // 6]
        claimed = [claiming(self.product, tile, self.caps) for tile in (*best, *finest[: count // 3])]
        tiles = list(dict.fromkeys([self.tile, *best, *(tile for tile in claimed if tile)]))
        yield tiles
        for knob, values in (("release", ("early", "late")), ("stream", (False, True))):
            yield turned(self.product, self.tile, self.caps, knob, values)
        primed = sorted({0, 1, max(1, self.tile.stages // 2), self.tile.stages})
        yield turned(self.product, self.tile, self.caps, "primed", primed)


class Tuner:
    """Tunes decode phases of a loaded backend. ``log`` gets one line per product."""

    def __init__(self, bench: Bench, log: Callable[[str], None]) -> None:
        self._bench, self._backend, self._log = bench, bench.backend, log
        self._program = bench.backend.program
        self._modules = Modules({}, [])
        self._modules.kernels |= bench.backend.modules.kernels
        self._scratch: dict[str, int] = {}

    def _choices(self, phase: Phase) -> list[Choice]:
        found: dict[str, Choice] = {}
        caps = self._program.caps
        for call in phase.calls:
            spec = self._program.kernels[call.entry].spec
            if spec.template != "linear_columns.cu.j2":
                continue
            op, *others = (op for op in call.ops if "w" in op.inputs and op.kind != "rmsnorm")
            values = {name: self._program.value(phase, ref.value) for name, ref in op.refs()}
            types = {name: ref_type(ref, values[name]) for name, ref in op.refs()}
            weights = [values["w"], *(self._program.value(phase, other.inputs["w"].value) for other in others)]
            formats = [weight.source.format for weight in weights if weight.source is not None]
            second = (formats[1], weights[1].type.shape[0]) if others else None
            product = product_of(op, types, formats[0], bool(spec.params["norm"]), bool(spec.params["keep"]), second)
            choice = Choice(product, [], choose(product, caps), caps)
            found.setdefault(choice.key, choice).calls.append(call.index)
        return list(found.values())

    def _prepare(self, specs: list[KernelSpec]) -> None:
        """Compile and load kernels under names of their own."""
        missing = [spec for spec in specs if spec.entry not in self._modules.kernels]
        sources = {spec.entry: kernel_source(spec, self._program.caps) for spec in missing}
        arch = self._program.caps.arch
        cubins = compile_all([Job(entry, source, arch) for entry, source in sources.items()])
        images = {s.entry: KernelImage(s, sources[s.entry], cubins[s.entry].image, cubins[s.entry].resources) for s in missing}
        if images:
            self._modules.kernels |= Modules(images, self._backend.devices).kernels

    def _call(self, call: Call, spec: KernelSpec) -> Call:
        known = {arg.name: arg for arg in call.args}
        args = []
        for name in spec.args:
            if name in spec.scratch:
                own = f"{call.index}." if name in spec.zeroed else ""  # counters belong to one call
                key = f"{own}{name}.{spec.scratch[name]}@{call.rank}"
                if key not in self._scratch:
                    self._scratch[key] = self._backend.devices[call.rank].allocate(spec.scratch[name], "tuning scratch")
                args.append(Arg(name, "pointer", "absolute", self._scratch[key]))
            elif name in spec.scalars:
                number = spec.scalars[name]
                args.append(Arg(name, "float" if isinstance(number, float) else "int", number=number))
            else:
                args.append(known[name])
        return replace(call, entry=spec.entry, args=tuple(args), grid=spec.grid, block=spec.block, smem=spec.smem,
                       cluster=spec.cluster)  # fmt: skip

    def _address(self, arg: Arg) -> int:
        return arg.offset if arg.region == "absolute" else self._backend.argument_address(arg)

    def _time(self, phase: Phase, specs: dict[int, KernelSpec], context: int, steps: int) -> float:
        calls = tuple(self._call(c, specs[c.index]) if c.index in specs else c for c in phase.calls)
        return self._bench.replay(replace(phase, calls=calls), self._modules, self._address, context, steps)

    def run(self, lanes: int, width: int, context: int, variants: int = 24, steps: int = 12) -> dict[str, dict[str, Any]]:
        """Tiles by product key for one phase."""
        phase = self._program.phases[f"decode{lanes}x{width}"]
        choices = sorted(self._choices(phase), key=lambda c: -len(c.calls) * c.weight)
        specs: dict[int, KernelSpec] = {}
        for choice in choices:
            # a device that has become warm is slower: what was measured minutes ago cannot be beaten
            best = self._time(phase, specs, context, steps)
            tried: set[Tile] = set()
            for offered in choice.rounds(variants):
                fresh = [tile for tile in offered if tile not in tried]
                tried.update(fresh)
                self._prepare([choice.spec(tile) for tile in fresh])
                for tile in fresh:
                    trial = specs | {index: choice.spec(tile) for index in choice.calls}
                    seconds = self._time(phase, trial, context, steps)
                    if seconds < best * GAIN:
                        best, specs, choice.tile = seconds, trial, tile
            self._log(f"{choice.key}: {asdict(choice.tile)} step {best * 1e3:.3f} ms, {len(tried)} tried")
        first, best = (self._time(phase, taken, context, steps) for taken in ({}, specs))
        self._log(f"decode{lanes}x{width}: step {first * 1e3:.3f} ms -> {best * 1e3:.3f} ms")
        return {choice.key: asdict(choice.tile) for choice in choices}
