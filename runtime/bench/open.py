"""Open a program or artifact for a measurement, with weights from the file or made on the device."""

from __future__ import annotations

from pathlib import Path

import artifacts
from compiler.driver import SHORT_PROMPTS, CompileOptions
from compiler.emit.arch import CARDS, card_as
from runtime.bench.device_fill import SynthWeights
from runtime.cuda.backend import CudaBackend
from runtime.cuda.device import Device, rank_caps
from runtime.cuda.driver import DeviceError, NoDevice, api
from runtime.cuda.transport import TRANSPORTS
from runtime.open import ArtifactWeights, Opened, cached_program, is_program, open_program
from runtime.vm.weights import WeightStore

SHORT_PROMPT = (1, SHORT_PROMPTS[0])  # lanes x columns of the graph of a short prompt; only a row of bench needs it


def open_for_bench(path: Path, devices: list[int], pairs: list[tuple[int, int]], context: int, weights: str, *,
                   score: bool, card: str | None = None, eager: bool = False, seed: int = 0,
                   transport: str = "auto", exchange: str = "f32") -> CudaBackend:  # fmt: skip
    """A loaded backend with one rank per device. An artifact is compiled for ``pairs`` and at least ``context`` tokens;
    ``weights`` is ``file`` or ``synth``; ``exchange`` what two ranks send in decode. Raises UsageError, ProgramError,
    DeviceError."""
    from runtime.cli.errors import UsageError

    if weights not in ("file", "synth"):
        raise UsageError(f"--weights {weights!r}: allowed are file, synth")
    if transport not in ("auto", *TRANSPORTS):
        raise UsageError(f"--transport {transport[:40]!r}: allowed are auto, {', '.join(TRANSPORTS)}")
    if card is not None and card not in CARDS:
        raise UsageError(f"--as {card[:40]!r}: allowed are {', '.join(sorted(CARDS))}")
    opening = open_program(path, None) if is_program(path) else artifacts.open(path)  # a wrong path is said before all else
    try:
        api()
    except NoDevice as error:
        raise DeviceError("a measurement needs an NVIDIA GPU and none is visible") from error
    if isinstance(opening, Opened):
        if card is not None:
            raise UsageError("--as belongs to compiling; the program has its target already")
        artifact, built = opening.artifact, opening.program
        if built.tp > 1 and built.options.get("exchange") != exchange:
            raise UsageError(f"{path}: its ranks send {built.options.get('exchange')}; say so with --exchange or compile again")
        for lanes, width in pairs:
            if (lanes, width) != SHORT_PROMPT and f"decode{lanes}x{width}" not in built.phases:
                raise UsageError(f"{path} has no decode graph {lanes}x{width}; compile it with --pairs")
    else:
        artifact = opening
        opened_devices = [Device(index) for index in devices]
        caps = rank_caps(opened_devices)
        for device in opened_devices:
            device.close()
        if card:
            caps = card_as(card, caps)
        options = CompileOptions(max_context=-(-context // 64) * 64, max_concurrency=max(b for b, _ in pairs),
                                 pairs=tuple(sorted({(1, 1), *pairs})), score=score, tp=len(devices),
                                 exchange=exchange)  # fmt: skip
        built, _ = cached_program(artifact, caps, options)
    source = SynthWeights(artifact, seed) if weights == "synth" else WeightStore(ArtifactWeights(artifact))
    return CudaBackend(built, source, devices, eager, transport=transport)
