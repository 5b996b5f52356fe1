"""A deep model in all quantised formats: two ranks give the bits of one, on the VM through all layers, and by the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from artifacts.identities.plan import FP8, NVFP4, Q4, Q5, Q6, W8
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.program.model import Program
from runtime.backend import VMBackend
from runtime.session import Request, Session
from runtime.vm import Machine
from tests.emulator import toolchain
from tests.emulator_backend import EmulatorBackend
from tests.tp.equality import DEEP, PERIOD, SAMPLED, deep_artifact, deep_store, tokens_and_logits

OPTIONS: dict[str, Any] = {"max_context": 320, "prefill_chunk": 128, "score": False}
Value = tuple[tuple[int, ...], bytes]


def planned(layers: int, tp: int, splits: tuple[tuple[int, int], ...], sms: int = 132, **options: Any) -> Program:
    chosen = CompileOptions(tp=tp, pairs=splits, max_concurrency=max(lanes for lanes, _ in splits), **(OPTIONS | options))
    return compile_program(deep_artifact(layers), caps("sm_90a", sms=sms), chosen, images=False)


def value(program: Program, layers: int, lanes: int, columns: int) -> Value:
    backend = VMBackend(Machine(program, deep_store(layers), "engine"))
    tokens, logits = tokens_and_logits(backend, columns, lanes, SAMPLED, prompt=11, new=4)
    return tuple(tokens), logits


def test_one_value_over_ranks_lanes_and_columns() -> None:
    """One period of the formats; tokens differ from each other, and partial sums rounded to bf16 give other logits."""
    splits = ((1, 1), (1, 8), (8, 4))
    programs = [planned(PERIOD, tp, splits) for tp in (1, 2)]
    values = [[value(program, PERIOD, *split) for split in splits] for program in programs]
    first = values[0][0]
    assert values == 2 * [[first] * len(splits)]
    assert len(set(first[0])) == len(first[0]) == 4
    assert value(planned(PERIOD, 2, ((1, 8),), exchange="bf16"), PERIOD, 1, 8)[1] != first[1]


def test_one_value_through_all_layers() -> None:
    """96 exchanges a token, all of them pushed by products, whose weights have every quantised format on both ranks."""
    splits = ((1, 1), (1, 4), (1, 8))
    two = planned(DEEP, 2, splits)
    for rank in range(2):
        formats = {item.source.format for item in two.values.values() if item.source is not None and item.rank == rank}
        assert formats >= {NVFP4, FP8, Q4, Q5, Q6, W8}
        for lanes, columns in splits:
            ops = [op for call in two.phases[f"decode{lanes}x{columns}"].calls for op in call.ops if op.rank == rank]
            assert sum(bool(op.attrs.get("pushed")) for op in ops if op.kind == "exchange_residual") == 2 * DEEP
    assert value(two, DEEP, 1, 4) == value(planned(DEEP, 1, splits), DEEP, 1, 8)


def emulated(tp: int) -> tuple[int, bytes, bytes]:
    """Token, logits and last recurrent state of a prompt of seven tokens through four columns, by the kernels."""
    program = planned(PERIOD, tp, ((1, 1), (1, 4)), sms=6)
    backend = EmulatorBackend(program, deep_store(PERIOD), transport="peer")
    session = Session(backend, prefill="none", columns=4, depth=0)
    (emission,) = session.generate(Request(list(range(3, 10)), 1, sampling=SAMPLED))
    assert session.step == 2 and session.last_phase == "decode1x4"
    states = [backend.read(f"recurrent{program.spec.gdn_layers[-1]}", rank)[0] for rank in range(tp)]
    return emission.token, session.logits("decode1x4", 3)[2].tobytes(), np.concatenate(states).tobytes()


@pytest.mark.skipif(bool(toolchain.missing_reason()), reason=str(toolchain.missing_reason()))
def test_kernels_of_two_ranks_equal_those_of_one() -> None:
    """Every product that pushes its sums, of every format; what each sends is checked at every exchange."""
    assert emulated(1) == emulated(2)
