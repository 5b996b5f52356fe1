"""The rule that blocks which wait find room: on planned programs, and broken in every way it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.emit.render import render
from compiler.ir.types import IRError
from compiler.kernels import exchange
from compiler.passes.coresident import check_coresident, waiting_blocks
from compiler.program.io import to_json
from compiler.program.model import EXCHANGE, Arg, Call, KernelImage, Program
from runtime.cuda import transport
from tests import models
from tests.compile.instantiations import DENSE, artifact

OPTIONS: dict[str, Any] = {"max_context": 256, "max_concurrency": 8, "prefill_chunk": 128, "tp": 2,
                           "pairs": ((1, 1), (1, 8), (8, 8))}  # fmt: skip


@pytest.mark.parametrize("sms", [8, 66, 132])
def test_programs_keep_the_rule(sms: int) -> None:
    """Few multiprocessors too: a rank's share of a small card. Slices do not add to what waits."""
    program = compile_program(models.artifact("dense-small"), caps("sm_90a", sms=sms), CompileOptions(**OPTIONS), images=False)
    waiting = [item for phase in program.phases.values() for item in phase.calls if waiting_blocks(item)]
    assert len(waiting) > 20 and max(waiting_blocks(item) for item in waiting) == min(sms, 128)


def test_exchanges_of_decode_begin_ahead_of_their_wait() -> None:
    """Behind a product that waits first everything but its sums is complete; a chunk of prefill learns its rows later."""
    program = compile_program(models.artifact("dense-small"), caps("sm_90a"), CompileOptions(**OPTIONS), images=False)
    for name, phase in program.phases.items():
        specs = [program.kernels[item.entry].spec for item in phase.calls
                 if any(op.kind == "exchange_residual" for op in item.ops)]  # fmt: skip
        assert specs and all(bool(spec.early) == (spec.params["settled"] is True) for spec in specs)
        assert all(bool(spec.early) == name.startswith("decode") for spec in specs), name


@pytest.mark.parametrize(("indices", "apart"), [((0, 0), 0), ((0, 1), 1)])
def test_dependents_begin_early_only_where_each_rank_has_a_device(indices: tuple[int, int], apart: int,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """On one device they could take the room of the product that an exchange waits for."""
    pinned = SimpleNamespace(array=np.zeros(64, np.uint8), address=1 << 20)
    monkeypatch.setattr(transport, "PinnedBuffer", lambda size: pinned)
    devices: Any = [SimpleNamespace(index=i, allocate=lambda *_: 4096, synchronize=lambda: None) for i in indices]
    made = transport.Exchange(devices, exchange.Mail(16, 1, 256), transport.PEER)
    assert [arg.number for arg in made.complete((Arg("apart", "int"), Arg("tiles", "int")))] == [apart, 1 + apart]


def test_the_pass_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel choice that breaks the rule does not compile."""
    chosen = exchange.residual_spec
    monkeypatch.setattr(exchange, "residual_spec", lambda *args: replace(chosen(*args), grid=(1, 133, 1)))
    with pytest.raises(IRError, match="133 blocks wait for others, 132 multiprocessors hold one each"):
        compile_program(models.artifact("dense-small"), caps("sm_90a"), CompileOptions(**OPTIONS), images=False)


def _resources(program: Program, entry: str, **changes: int) -> dict[str, KernelImage]:
    image = program.kernels[entry]
    return {**program.kernels, entry: replace(image, resources=replace(image.resources, **changes))}


CASES: list[tuple[Callable[[Call], Call], dict[str, int], str]] = [
    (lambda c: replace(c, grid=(1, 133, 2)), {}, "133 blocks wait for others"),
    (lambda c: replace(c, block=1056), {}, "a block of 1056 threads"),
    (lambda c: replace(c, smem=240 << 10), {}, "does not fit a multiprocessor"),
    (lambda c: c, {"registers": 255 + 2}, "does not fit a multiprocessor"),
    (lambda c: c, {"static_smem": 240 << 10}, "does not fit a multiprocessor"),
    (lambda c: replace(c, cluster=(4, 4, 1)), {}, "clusters of 16 blocks; at most 8"),
]


@pytest.mark.parametrize(("change", "resources", "message"), CASES, ids=[case[2] for case in CASES])
def test_what_breaks_it_is_refused(change: Callable[[Call], Call], resources: dict[str, int],
                                   message: str) -> None:  # fmt: skip
    program = models.program("dense-small", **OPTIONS)
    phase = program.phases["prefill"]
    index = next(i for i, item in enumerate(phase.calls) if waiting_blocks(item))
    calls = list(phase.calls)
    calls[index] = change(calls[index])
    kernels = _resources(program, calls[index].entry, **resources)
    check_coresident(program.phases, program.kernels, program.caps)
    with pytest.raises(IRError, match=message) as raised:
        check_coresident({phase.name: replace(phase, calls=tuple(calls))}, kernels, program.caps)
    assert calls[index].entry in str(raised.value) and "prefill" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("sms", [66, 132])
@pytest.mark.parametrize("name", DENSE)
def test_full_size_models_keep_the_rule(name: str, sms: int) -> None:
    """Every registered 27B model in every width: products push words up to 8 columns and tiles of a prefill chunk; what
    exchanges send themselves are slices where columns are many."""
    options = OPTIONS | {"max_context": 8192, "prefill_chunk": 1024, "pairs": ((1, 1), (1, 4), (1, 8), (8, 1), (8, 8))}
    program = compile_program(artifact(name), caps("sm_90a", sms=sms), CompileOptions(**options), images=False)
    for phase in program.phases.values():
        pushed = {op.attrs["ordinal"] for item in phase.calls for op in item.ops
                  if op.kind == "linear" and "ordinal" in op.attrs}  # fmt: skip
        pushing = phase.name in ("prefill", "score") or phase.columns <= 8
        assert len(pushed) == (128 if pushing else 0)
        if phase.columns >= 64:
            assert all(item.grid[2] == 2 for item in phase.calls if item.ops[0].kind == "exchange_residual")
    assert 20 << 20 <= program.regions[0][EXCHANGE] == program.regions[1][EXCHANGE] <= 24 << 20


def test_one_rank_knows_nothing_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for one rank is the same, schedule and kernels, whatever is said about exchanges; nothing of them is run."""
    for name in ("Sharder", "check_coresident"):
        monkeypatch.setattr(f"compiler.driver.{name}", lambda *args, name=name: pytest.fail(f"{name} is used"))
    plans = []
    for extra in ({}, {"exchange": "bf16", "exchange_prefill": "f32", "fused": False}):
        one = compile_program(models.artifact("dense-small"), caps("sm_90a"), CompileOptions(**(OPTIONS | {"tp": 1} | extra)),
                              images=False)  # fmt: skip
        plan = to_json(one)
        del plan["options"]
        plans.append(plan)
        assert EXCHANGE not in one.regions[0] and not any("exchange" in entry for entry in one.kernels)
        sources = [render(image.spec.template, entry, image.spec.params) for entry, image in one.kernels.items()]
        assert not any("outbox" in source for source in sources)
    assert plans[0] == plans[1]
