"""A session: lanes of one program, driven by ingress records; no global state.

The host never looks at a token to launch the next step: the device queues its own input, freezes a lane on a stop, and
the host reads results up to ``depth`` steps behind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from compiler.control import MAX_STOPS, PAGE, ControlLimits, DeviceFault, Finish
from compiler.ir.op import Array
from compiler.program.model import Phase
from runtime.backend import Backend
from runtime.control import StepResult, read_egress, sampling_words


class RequestError(ValueError):
    """A request cannot be served by this program; names the limit."""


class EngineFault(RuntimeError):
    """The device reported a fault word: the session is not usable any more."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a lane (spec/mtp.md §7). Temperature 0 is the exact argmax."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """Token ids of a prompt, at most ``max_new`` tokens of output, ids that end it. After ``pause`` tokens of output the
    lane stands still until ``Session.resume``; 0: never."""

    prompt: Sequence[int]
    max_new: int
    stop_ids: Sequence[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    pause: int = 0


def pages_of(request: Request, limits: ControlLimits) -> int:
    """KV pages that a request holds while it runs."""
    return -(-min(limits.max_context, len(request.prompt) + request.max_new) // PAGE)


def check_ids(ids: Sequence[int], limits: ControlLimits) -> None:
    """Raise RequestError for a sequence that is empty, longer than the context, or holds ids without a token (padded
    rows of the vocabulary included)."""
    if not ids:
        raise RequestError("the prompt has no tokens")
    if len(ids) > limits.max_context:
        raise RequestError(f"{len(ids)} tokens exceed --max-context {limits.max_context}")
    for position, token in enumerate(ids):
        if not 0 <= token < limits.vocab_ids:
            raise RequestError(f"token {position} of the prompt is {token}; ids 0…{limits.vocab_ids - 1} exist")


def check_request(request: Request, limits: ControlLimits) -> None:
    """Raise RequestError naming the limit of a program, compiled or planned, that ``request`` breaks."""
    if len(request.prompt) >= limits.max_context:
        raise RequestError(
            f"the prompt has {len(request.prompt)} tokens, --max-context {limits.max_context} allows "
            f"{limits.max_context - 1} and one of output"
        )
    check_ids(request.prompt, limits)
    if request.max_new < 1:
        raise RequestError(f"max_new is {request.max_new}; at least 1 is needed")
    if len(request.stop_ids) > MAX_STOPS:
        raise RequestError(f"{len(request.stop_ids)} stop ids; at most {MAX_STOPS} are allowed")
    if pages_of(request, limits) > limits.pages:
        raise RequestError(f"prompt and output need {pages_of(request, limits)} KV pages of {PAGE} tokens, the program has "
                           f"{limits.pages}; lower the output limit or compile with a larger --kv-capacity")  # fmt: skip


@dataclass
class Lane:
    """State of a running request on the host. ``fed`` prompt tokens have been handed to the device."""

    index: int
    request: Request
    slot: int
    pages: list[int]
    start: int  # first step of this request: results of earlier steps belong to the lane's last one
    fed: int = 0
    queued: int = 0
    produced: int = 0
    finish: Finish = Finish.NONE
    last: int | None = None  # of a paused lane: its last token, which the device has not taken as input yet


@dataclass(frozen=True)
class Emission:
    """One token of a lane; ``finish`` is set with the last one, ``paused`` with the one after which the lane waits."""

    lane: int
    token: int
    finish: Finish
    paused: bool = False


class Session:
    """Runs requests on a backend. ``prefill``: ``chunks`` (the prefill phase), or ``none`` (every prompt token through
    decode columns; a test option). ``depth``: steps launched ahead of reading. ``permute``: seed that permutes slots
    and pages (tests: nothing may depend on which ones a lane gets)."""

    def __init__(self, backend: Backend, prefill: str = "chunks", depth: int = 2, permute: int | None = None,
                 columns: int | None = None) -> None:  # fmt: skip
        if prefill not in ("chunks", "none"):
            raise RequestError(f"prefill {prefill!r}: allowed are chunks, none")
        self.backend = backend
        self.program = backend.program
        self.limits = self.program.limits
        self.prefill = prefill
        self.depth = depth
        self.columns = columns
        self.last_phase = ""
        self._ingress = backend.ingress
        self._read = self.step  # next step whose result is to be read
        self._lanes: dict[int, Lane] = {}
        slots, pages = list(range(self.limits.slots)), list(range(self.limits.pages))
        if permute is not None:
            shuffle = random.Random(permute)
            shuffle.shuffle(slots)
            shuffle.shuffle(pages)
        self._free_slots, self._free_pages = slots, pages
        self._pending: list[Emission] = []
        decode = [p for p in self.program.phases.values() if p.phase == "decode"]
        self._decode: dict[tuple[int, int], Phase] = {(p.lanes, p.width): p for p in decode}

    @property
    def step(self) -> int:
        """Number of the next launch."""
        return self._ingress.step

    # -- requests

    def check(self, request: Request) -> None:
        """Raise RequestError naming the limit that ``request`` breaks."""
        check_request(request, self.limits)

    def fits(self, request: Request) -> bool:
        """Whether a lane and enough KV pages are free now."""
        return self.free_lane() is not None and pages_of(request, self.limits) <= len(self._free_pages)

    def free_lane(self) -> int | None:
        """The lowest lane without a request, None when all are busy."""
        return next((b for b in range(self.limits.lanes) if b not in self._lanes), None)

    def submit(self, request: Request, lane: int | None = None) -> int:
        """Place a request on a free lane (the lowest, or ``lane``). Returns the lane. Raises RequestError."""
        self.check(request)
        index = self.free_lane() if lane is None else lane
        if index is None or index in self._lanes:
            raise RequestError("no lane is free")
        count = pages_of(request, self.limits)
        if count > len(self._free_pages):
            raise RequestError(f"the request needs {count} KV pages, {len(self._free_pages)} are free")
        pages, self._free_pages = self._free_pages[:count], self._free_pages[count:]
        entry = Lane(index, request, self._free_slots.pop(0), pages, self.step)
        self._lanes[index] = entry
        self._write_lane(entry)
        return index

    def _write_lane(self, lane: Lane) -> None:
        at, write, b = self.step, self._ingress.write, lane.index
        stops = [*lane.request.stop_ids, *([-1] * MAX_STOPS)][:MAX_STOPS]
        scalars = {"lane_slot": lane.slot, "lane_page_row": b, "lane_len": 0, "lane_prompt_len": len(lane.request.prompt),
                   "lane_limit": lane.request.pause or lane.request.max_new, "lane_generated": 0, "lane_frozen": 0,
                   "lane_rope_delta": 0, "queue_head": 0, "queue_tail": 0}  # fmt: skip
        for table, value in scalars.items():
            write(at, table, [value], (b,))
        write(at, "lane_stops", stops, (b, 0))
        write(at, "lane_sampling", sampling_words(vars(lane.request.sampling)), (b, 0))
        write(at, "slot_pending", [0], (lane.slot,))
        write(at, "slot_parity", [0], (lane.slot,))
        write(at, "page_table", lane.pages, (b, 0))
        self._ingress.clear_counts(at, lane.slot)

    def lift(self, lane: int) -> None:
        """Let a lane run on without its pause, unless it has got there already: then it still reports it."""
        if lane in self._lanes:
            self._ingress.write(self.step, "lane_limit", [self._lanes[lane].request.max_new], (lane,))

    def resume(self, lane: int, forced: Sequence[int] = ()) -> None:
        """Let a paused lane go on, with ``forced`` as its next tokens of output. They come out as emissions and count
        towards the limit, but not in the penalties. Raises RequestError where one token more does not fit."""
        entry = self._lanes.get(lane)
        if entry is None or entry.last is None:
            raise RequestError(f"lane {lane} is not paused")
        check_ids([entry.last, *forced], self.limits)
        tokens, produced = [entry.last, *forced], entry.produced + len(forced)
        if produced >= entry.request.max_new or entry.queued + len(tokens) > self.limits.max_context:
            raise RequestError(f"{len(forced)} tokens to insert after {entry.produced} do not fit max_new "
                               f"{entry.request.max_new} and --max-context {self.limits.max_context}")  # fmt: skip
        entry.last, entry.produced = None, produced
        self._ingress.write(self.step, "queue", tokens, (lane, 0))
        scalars = {"queue_head": 0, "queue_tail": len(tokens), "lane_generated": produced,
                   "lane_limit": entry.request.max_new, "lane_frozen": 0}  # fmt: skip
        if forced:  # nothing is sampled until they are consumed, and what follows is drawn as after a prompt
            scalars["lane_prompt_len"] = entry.queued + len(tokens)
        for table, value in scalars.items():
            self._ingress.write(self.step, table, [value], (lane,))
        self._pending += [Emission(lane, token, Finish.NONE) for token in forced]

    def cancel(self, lane: int) -> None:
        """Stop a lane at the next step and free it."""
        if lane in self._lanes:
            self._ingress.write(self.step, "lane_frozen", [1], (lane,))
            self._release(self._lanes[lane])

    def _release(self, lane: Lane) -> None:
        del self._lanes[lane.index]
        self._free_slots.append(lane.slot)
        self._free_pages.extend(lane.pages)

    # -- steps

    @property
    def active(self) -> int:
        return len(self._lanes)

    def advance(self) -> list[Emission]:
        """Launch one step and return the emissions that have become known (up to ``depth`` steps behind)."""
        if self._lanes:
            self._launch_next()
        self._collect(self.step - self.depth if self._lanes else self.step)
        out, self._pending = self._pending, []
        return out

    def generate(self, request: Request) -> Iterator[Emission]:
        """Run one request alone to its end."""
        lane = self.submit(request)
        while lane in self._lanes:
            yield from (e for e in self.advance() if e.lane == lane)

    def _launch_next(self) -> None:
        waiting = [lane for lane in self._lanes.values() if lane.fed < len(lane.request.prompt)]
        if waiting and self.prefill == "chunks":
            lane = min(waiting, key=lambda item: item.index)
            short = self._short_phase(lane)
            if short is None:
                self._prefill_chunk(lane)
                return
            self._feed(lane, len(lane.request.prompt))
            self._launch(short.name)
            return
        width = 1
        if waiting:
            for lane in waiting:  # a wide step gets no more than its columns, or nothing would be left for the next one
                self._feed(lane, lane.fed + (self.columns or self.limits.queue // 2))
            width = self.columns or 1
        top = max(self._lanes) + 1
        fitting = [key for key in self._decode if key[0] >= top and key[1] == width]
        if not fitting:
            raise RequestError(f"the program has no decode graph of {top} lanes × {width} columns; compile with --pairs")
        self._launch(self._decode[min(fitting)].name)

    def _short_phase(self, lane: Lane) -> Phase | None:
        """A one-lane decode graph that takes the whole remaining prompt: cheaper than a prefill chunk."""
        left = len(lane.request.prompt) - lane.fed
        if lane.index != 0 or lane.fed or len(self._lanes) > 1:
            return None
        fitting = [key for key in self._decode if key[0] == 1 and key[1] >= left]
        return self._decode[min(fitting)] if fitting else None

    def _feed(self, lane: Lane, target: int) -> None:
        """Queue prompt tokens up to ``target`` as far as the device's ring has room for them."""
        target = min(target, len(lane.request.prompt))
        size = self.limits.queue
        while lane.fed < target and lane.fed - self._consumed_tokens(lane) < size - 1:
            room = size - 1 - (lane.fed - self._consumed_tokens(lane))
            start = lane.fed % size
            count = min(target - lane.fed, room, size - start)
            self._ingress.write(self.step, "queue", list(lane.request.prompt[lane.fed : lane.fed + count]), (lane.index, start))
            lane.fed += count
        self._ingress.write(self.step, "queue_tail", [lane.fed], (lane.index,))

    def _consumed_tokens(self, lane: Lane) -> int:
        return lane.queued

    def _prefill_chunk(self, lane: Lane) -> None:
        phase = self.program.phases[self.backend.prefill]
        prompt = lane.request.prompt
        count = min(phase.width, len(prompt) - lane.fed)
        final = lane.fed + count == len(prompt)
        write, at = self._ingress.write, self.step
        write(at, "pf_control", [lane.index, int(final)], (0,))
        for table, value in (("pf_lane_slot", lane.slot), ("pf_lane_page_row", lane.index), ("pf_lane_ncols", count),
                             ("pf_lane_len", lane.fed)):  # fmt: skip
            write(at, table, [value], (0,))
        write(at, "pf_tokens", list(prompt[lane.fed : lane.fed + count]), (0,))
        for axis in range(3):
            write(at, "pf_positions", list(range(lane.fed, lane.fed + count)), (axis, 0))
        lane.fed += count
        self._launch(phase.name)

    def _launch(self, phase: str) -> None:
        self.backend.launch(phase)
        self.last_phase = phase
        self._ingress.step += 1

    def _collect(self, until: int) -> None:
        """Read results of the steps below ``until``."""
        while self._read < until:
            result = read_egress(self.backend.egress, self.limits.lanes, self._read)
            if result is None:
                self.backend.wait()
                result = read_egress(self.backend.egress, self.limits.lanes, self._read)
                if result is None:
                    raise EngineFault(f"step {self._read} left no result: the device stopped")
            self.backend.check()
            self._read += 1
            self._ingress.consumed(self._read)
            self._apply(result)

    def _apply(self, result: StepResult) -> None:
        if result.fault:
            raise EngineFault(f"step {result.step}: the device reports {DeviceFault(result.fault).name}")
        for index, lane in list(self._lanes.items()):
            if result.step < lane.start:
                continue
            state = result.lanes[index]
            lane.queued = state.length
            if state.emitted is None:
                continue
            lane.produced += 1
            paused = state.reason == Finish.LIMIT and lane.produced < lane.request.max_new
            lane.finish = Finish.NONE if paused else Finish(state.reason)
            lane.last = state.emitted if paused else None
            self._pending.append(Emission(index, state.emitted, lane.finish, paused))
            if lane.finish:
                self._release(lane)

    def logits(self, phase: str, rows: int) -> Array:
        """The first ``rows`` rows of the logits of the last launch of ``phase``, all ranks' shares of the vocabulary."""
        parts = [self.backend.read_activation(phase, name, rows) for name in self.program.phases[phase].outputs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    # -- scoring

    def score(self, ids: Sequence[int]) -> Iterator[Array]:
        """Teacher-forced logits of ``ids``, chunk by chunk, [rows, vocabulary rows] (``ninferc logits``)."""
        if "score" not in self.program.phases:
            raise RequestError("the program has no scoring phase; compile without --no-score")
        if self._lanes:
            raise RequestError("scoring needs an idle session")
        check_ids(ids, self.limits)
        phase = self.program.phases["score"]
        lane = Lane(0, Request(list(ids), 1), self._free_slots[0], self._free_pages[: -(-len(ids) // PAGE)],
                    self.step)
        self._write_lane(lane)
        for start in range(0, len(ids), phase.width):
            count = min(phase.width, len(ids) - start)
            write, at = self._ingress.write, self.step
            write(at, "pf_control", [0, 0], (0,))
            for table, value in (("pf_lane_slot", lane.slot), ("pf_lane_page_row", 0), ("pf_lane_ncols", count),
                                 ("pf_lane_len", start)):  # fmt: skip
                write(at, table, [value], (0,))
            write(at, "sc_tokens", list(ids[start : start + count]), (0,))
            for axis in range(3):
                write(at, "sc_positions", list(range(start, start + count)), (axis, 0))
            self._launch("score")
            self._collect(self.step)
            yield self.logits("score", count)
