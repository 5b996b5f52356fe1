"""Run requests on a session: lanes join and leave, ids become text, stop strings cancel a lane."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from compiler.control import Finish as DeviceFinish
from runtime.frontend.frontend import ThinkingBudget
from runtime.frontend.output_stream import Event, FinishReason, OutputStream
from runtime.frontend.presets import SamplingParams
from runtime.session import Emission, Request, Sampling, Session

_REASONS = {
    DeviceFinish.NONE: FinishReason.NONE,
    DeviceFinish.STOP_TOKEN: FinishReason.STOP_TOKEN,
    DeviceFinish.LIMIT: FinishReason.OUTPUT_LIMIT,
    DeviceFinish.CAPACITY: FinishReason.CONTEXT_CAPACITY,
}


def request_of(ids: Sequence[int], params: SamplingParams, budget: ThinkingBudget | None = None) -> Request:
    """What the device needs of a prompt and its sampling parameters."""
    sampling = Sampling(
        temperature=0.0 if params.greedy else params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence=params.presence,
        frequency=params.frequency,
        seed=params.seed,
    )
    return Request(ids, params.max_new, params.stop_ids, sampling, budget.tokens if budget else 0)


@dataclass
class Job:
    """A request and the reader of its answer; without a reader (no tokenizer) only ids come out. ``budget``: of a request
    that pauses when the model has thought that long."""

    request: Request
    stream: OutputStream | None
    budget: ThinkingBudget | None = None


@dataclass
class Outcome:
    """What became of a job. ``index`` counts the jobs in the order given. Times are seconds: ``prefill`` from joining a
    lane to the first token, ``decode`` from there to the last one."""

    index: int
    job: Job
    ids: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE
    stop: str | int | None = None
    joined: float = 0.0
    first: float = 0.0
    last: float = 0.0
    closed: bool = False  # the think block, by the model or by its budget

    @property
    def prefill(self) -> float:
        return max(self.first - self.joined, 0.0) if self.ids else 0.0

    @property
    def decode(self) -> float:
        return self.last - self.first


Listener = Callable[[int, list[Event], int], None]
"""Called as ``listener(job index, events, token)`` for every token; the events may be none."""


def generate(session: Session, jobs: Iterable[Job], lanes: int | None = None, listener: Listener | None = None,
             clock: Callable[[], float] = time.monotonic) -> Iterator[Outcome]:  # fmt: skip
    """Answer ``jobs`` on at most ``lanes`` lanes at a time; an outcome comes as soon as its job has ended.

    A job joins when a lane and its KV pages are free, in the order given. Closing the iterator cancels what runs.
    Raises RequestError for a job that the program can never run, EngineFault, DeviceError.
    """
    waiting = deque(enumerate(jobs))
    running: dict[int, Outcome] = {}
    width = min(lanes or session.limits.lanes, session.limits.lanes)
    try:
        while waiting or running:
            while waiting and len(running) < width:
                index, job = waiting[0]
                session.check(job.request)
                if not session.fits(job.request):
                    break  # a lane that leaves frees its pages
                waiting.popleft()
                running[session.submit(job.request)] = Outcome(index, job, joined=clock())
            for emission in session.advance():
                outcome = running.get(emission.lane)
                if outcome is None:
                    continue  # steps that were in flight when a stop string cancelled the lane
                _take(outcome, emission.token, emission.finish, clock(), listener)
                if outcome.finish is FinishReason.NONE:
                    _limit_thinking(session, outcome, emission)
                else:
                    del running[emission.lane]
                    if not emission.finish:
                        session.cancel(emission.lane)
                    yield outcome
    finally:
        for lane in running:
            session.cancel(lane)


def _limit_thinking(session: Session, outcome: Outcome, emission: Emission) -> None:
    """Close the think block where the budget is spent; go on as if there were none where the model has closed it."""
    budget, stream = outcome.job.budget, outcome.job.stream
    if budget is None or stream is None:
        return
    if emission.paused:
        session.resume(emission.lane, budget.close if stream.reasoning else ())
        outcome.closed = True
    elif not stream.reasoning and not outcome.closed:
        session.lift(emission.lane)
        outcome.closed = True


def _take(outcome: Outcome, token: int, finish: DeviceFinish, now: float, listener: Listener | None) -> None:
    """Account for one token; sets ``outcome.finish`` with the last one."""
    outcome.first = outcome.first if outcome.ids else now
    outcome.last = now
    outcome.ids.append(token)
    events: list[Event] = []
    stream = outcome.job.stream
    if stream is not None:
        events = stream.feed(token)
        if finish and not stream.done:
            events += stream.finish(_REASONS[finish])
        if stream.done:
            outcome.finish, outcome.stop = stream.answer.finish.reason, stream.answer.finish.stop
    elif finish:
        outcome.finish = _REASONS[finish]
        outcome.stop = token if finish is DeviceFinish.STOP_TOKEN else None
    if listener is not None:
        listener(outcome.index, events, token)
