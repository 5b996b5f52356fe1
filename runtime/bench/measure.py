"""Time phases of a loaded program: decode steps and prefill chunks as graph replays.

The lanes are driven by ingress records alone, without a session, so that host work outside a launch is not timed. A cache
that no prompt filled is filled with random values and the record says so.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from artifacts.tools.synth_bits import bf16_around_zero
from compiler.control import MAX_STOPS, PAGE, DeviceFault
from compiler.ir.types import Kind, Value
from compiler.program.model import Arg, Phase
from runtime.bench.device_fill import Event, ToolKernels
from runtime.control import RingFull, read_egress, sampling_words
from runtime.cuda.backend import CudaBackend
from runtime.cuda.driver import DeviceError
from runtime.cuda.graph import GraphPhase
from runtime.cuda.modules import Modules

FOREVER = 1 << 30
GREEDY = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "top_k": 0, "seed": 0}


@dataclass(frozen=True)
class DecodeTiming:
    """Seconds per step of each repeat, and host seconds per launch call."""

    seconds: list[float]
    host: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Bench:
    """Measurements on one backend."""

    def __init__(self, backend: CudaBackend, seed: int = 0) -> None:
        self.backend = backend
        self.program = backend.program
        self.limits = backend.program.limits
        self._ingress = backend.ingress
        self._random = random.Random(seed)
        self._tools = [ToolKernels(device) for device in backend.devices]

    @property
    def step(self) -> int:
        return self._ingress.step

    def read_rates(self) -> dict[str, float]:
        """Bytes/s of each read kernel over a buffer of 8 GiB on rank 0. The faster one is the roofline."""
        device = self.backend.devices[0]
        size = 1 << 33
        address = device.allocate(size, "roofline measurement")
        self._tools[0].fill(address, size, 1, (1 << 64) - 1, 0)
        rates = self._tools[0].read_rates(address, size)
        device.release(address)
        return rates

    def fill_caches(self) -> None:
        """Random BF16 keys and values of root mean square 1 in every page, and recurrent states of order 0.1."""
        for name, value in self.program.values.items():
            place = self.program.placements[name]
            address = self.backend.address(place)
            tools = self._tools[value.rank]
            if value.kind is Kind.STATE and name.startswith("kv"):
                mask, add = bf16_around_zero(1.0)
                tools.fill(address, value.nbytes, 77 + len(name), mask, add)
            elif value.kind is Kind.STATE and name.startswith("recurrent"):
                tools.fill(address, value.nbytes, 99 + len(name), 0x807FFFFF807FFFFF, 0x3D0000003D000000)
        self.backend.wait()

    def set_lane(self, lane: int, length: int, prompt: int, tokens: list[int]) -> None:
        """Records that put a lane at ``length`` cached tokens with ``tokens`` queued; forced until ``prompt``."""
        write, at = self._ingress.write, self.step
        for table, value in {"lane_slot": lane, "lane_page_row": lane, "lane_len": length, "lane_prompt_len": prompt,
                             "lane_limit": FOREVER, "lane_generated": 0, "lane_frozen": 0, "lane_rope_delta": 0,
                             "queue_head": 0, "queue_tail": len(tokens)}.items():  # fmt: skip
            write(at, table, [value], (lane,))
        write(at, "slot_pending", [0], (lane,))
        write(at, "lane_stops", [-1] * MAX_STOPS, (lane, 0))
        write(at, "lane_sampling", sampling_words(GREEDY), (lane, 0))
        write(at, "queue", tokens, (lane, 0))
        per_row = min(self.limits.pages_per_row, self.limits.pages // self.limits.lanes)
        write(at, "page_table", list(range(lane * per_row, (lane + 1) * per_row)), (lane, 0))

    def _launch(self, phase: str) -> None:
        self.backend.launch(phase)
        self._ingress.step += 1

    def _settle(self) -> None:
        self.backend.wait()
        self._ingress.consumed(self.step)
        result = read_egress(self.backend.egress, self.limits.lanes, self.step - 1)
        if result is None or result.fault:
            name = DeviceFault(result.fault).name if result else "no result"
            raise DeviceError(f"bench: step {self.step - 1} failed ({name})")

    def decode(self, lanes: int, width: int, context: int, steps: int, repeats: int) -> DecodeTiming:
        """Steps of ``lanes`` × ``width`` active columns at ``context`` tokens. Raises DeviceError when a step faults."""
        phase = f"decode{lanes}x{width}"
        warm = 4
        if context + (steps + warm) * width > self.limits.max_context:
            limit = self.limits.max_context
            raise DeviceError(f"bench: context {context} and {steps} steps of {width} exceed --max-context {limit}")
        seconds, host = [], []
        for _ in range(repeats):
            for lane in range(lanes):
                count = (steps + warm) * width if width > 1 else 1
                forced = [self._random.randrange(self.limits.vocab_ids) for _ in range(count)]
                self.set_lane(lane, context, FOREVER if width > 1 else context, forced)
            for _ in range(warm):
                self._launch(phase)
            self._settle()
            start, stop = Event(self.backend.devices[0]), Event(self.backend.devices[0])
            start.record()
            before = time.perf_counter()
            for _ in range(steps):
                self._launch(phase)
            host.append((time.perf_counter() - before) / steps)
            stop.record()
            seconds.append(start.seconds_to(stop) / steps)
            self._settle()
            result = read_egress(self.backend.egress, self.limits.lanes, self.step - 1)
            assert result is not None
            want = context + (steps + warm) * width
            if any(result.lanes[lane].length != want for lane in range(lanes)):
                raise DeviceError(f"bench: lanes did not advance by {width} columns a step")
        return DecodeTiming(seconds, statistics.median(host))

    def replay(self, phase: Phase, modules: Modules, address_of: Callable[[Arg], int], context: int, steps: int) -> float:
        """Median seconds of one replay of ``phase`` over three runs of ``steps``, all columns active at ``context`` tokens.

        ``phase`` may be a decode phase with calls changed or left out, as long as ``begin`` and ``advance`` are there."""
        graph, times = self.backend.graph(phase, modules, address_of), []
        for _ in range(3):
            self._set_lanes(phase, context, steps)
            start, stop = Event(self.backend.devices[0]), Event(self.backend.devices[0])
            start.record()
            for _ in range(steps):
                self._replay(graph)
            stop.record()
            times.append(start.seconds_to(stop) / steps)
            self.backend.wait()
            self._ingress.consumed(self.step)
        graph.close()
        return statistics.median(times)

    def replay_after(self, plain: Phase, noted: Phase, modules: Modules, address_of: Callable[[Arg], int], context: int,
                     before: int, samples: int, collect: Callable[[int], None]) -> None:  # fmt: skip
        """``samples`` times: ``before`` replays of ``plain`` and one of ``noted`` behind them, then ``collect(sample)`` with
        the devices idle. Both phases compute the same; ``noted`` runs kernels of ``modules``."""
        graphs = [self.backend.graph(plain, self.backend.modules, self.backend.argument_address),
                  self.backend.graph(noted, modules, address_of)]  # fmt: skip
        for sample in range(samples):
            self._set_lanes(plain, context, before + 1)
            for _ in range(before):
                self._replay(graphs[0])
            self._replay(graphs[1])
            self.backend.wait()
            self._ingress.consumed(self.step)
            collect(sample)
        for graph in graphs:
            graph.close()

    def _set_lanes(self, phase: Phase, context: int, steps: int) -> None:
        for lane in range(phase.lanes):
            self.set_lane(lane, context, FOREVER, [1] * (steps * phase.width))

    def _replay(self, graph: GraphPhase) -> None:
        graph.launch(self.backend.devices[0])
        self._ingress.step += 1

    def prefill(self, tokens: int, repeats: int) -> list[float]:
        """Seconds from the first launch to the last result of a prompt of random ids, per repeat."""
        phase = self.program.phases[self.backend.prefill]
        out = []
        for _ in range(repeats + 1):
            prompt = [self._random.randrange(self.limits.vocab_ids) for _ in range(tokens)]
            self.set_lane(0, 0, tokens, [])
            start, stop = Event(self.backend.devices[0]), Event(self.backend.devices[0])
            start.record()
            for begin in range(0, tokens, phase.width):
                chunk = prompt[begin : begin + phase.width]
                self._write_chunk(chunk, begin, begin + len(chunk) == tokens)
                self._launch(phase.name)
            stop.record()
            out.append(start.seconds_to(stop))
            self._settle()
            self._set_frozen(0)
        return out[1:]

    def _set_frozen(self, lane: int) -> None:
        self._ingress.write(self.step, "lane_frozen", [1], (lane,))

    def _write_chunk(self, chunk: list[int], begin: int, final: bool) -> None:
        while True:
            try:
                write, at = self._ingress.write, self.step
                write(at, "pf_tokens", chunk, (0,))
                break
            except RingFull:
                self._settle()
        for axis in range(3):
            write(at, "pf_positions", list(range(begin, begin + len(chunk))), (axis, 0))
        write(at, "pf_control", [0, int(final)], (0,))
        scalars = {"pf_lane_slot": 0, "pf_lane_page_row": 0, "pf_lane_ncols": len(chunk), "pf_lane_len": begin}
        for table, value in scalars.items():
            write(at, table, [value], (0,))
        if self._ingress.outstanding_words > 40000:
            self._drain()

    def _drain(self) -> None:
        """Wait for all but the last few launches, so that ring words become free without idling the device."""
        target = self.step - 4
        while target > 0 and read_egress(self.backend.egress, self.limits.lanes, target - 1) is None:
            time.sleep(0)
        self._ingress.consumed(max(target, 0))

    def first_token(self, tokens: int, repeats: int) -> list[float]:
        """Seconds from launch to the first token of a short prompt through the narrowest decode graph that takes it."""
        widths = [p.width for p in self.program.phases.values() if p.phase == "decode" and p.lanes == 1 and p.width >= tokens]
        if not widths:
            raise DeviceError(f"bench: no decode graph takes a prompt of {tokens} tokens at once")
        phase, out = f"decode1x{min(widths)}", []
        for _ in range(repeats + 2):
            self.set_lane(0, 0, tokens, [self._random.randrange(self.limits.vocab_ids) for _ in range(tokens)])
            start, stop = Event(self.backend.devices[0]), Event(self.backend.devices[0])
            start.record()
            self._launch(phase)
            stop.record()
            out.append(start.seconds_to(stop))
            self._settle()
            self._set_frozen(0)
        return out[2:]

    def step_bytes(self, phase: Phase, context: int) -> int:
        """Bytes that one decode step must move: weights of the phase (one row of the embedding per column), recurrent
        states read and written, convolution windows, and the cached keys and values of every lane."""
        total = 0
        for name in {ref.value for item in phase.calls for op in item.ops for _, ref in op.refs()}:
            value: Value | None = self.program.values.get(name)
            if value is None or value.rank != 0:
                continue
            if value.kind is Kind.WEIGHT:
                embedding = any(op.kind == "embed" and op.inputs["w"].value == name for item in phase.calls for op in item.ops)
                total += value.nbytes // value.type.shape[0] * phase.columns if embedding else value.nbytes
            elif name.startswith("recurrent"):
                total += 2 * value.nbytes // value.type.shape[0] * phase.lanes
            elif name.startswith("window"):  # [2, slots, …]: one half is read, the other written
                total += value.nbytes // value.type.shape[1] * phase.lanes
            elif name.startswith("kv"):
                total += value.nbytes // value.type.shape[0] // PAGE * context * phase.lanes
        return total
