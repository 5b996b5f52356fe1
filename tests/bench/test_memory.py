"""Memory rows of ``bench``: per device what ``plan`` says, what the driver has allocated, what the device has less of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

from compiler.program.io import load
from compiler.program.model import EXCHANGE
from runtime.bench.measure import Bench, DecodeTiming
from runtime.cli.capacity import DRIVER_BYTES
from runtime.cuda.backend import CudaBackend
from tests import models
from tests.cli.conftest import run_cli
from tests.cli.fake_driver import FakeDriver

CONTEXT = 256 << 20  # what the made-up driver takes for a context
MEASURING = 24 << 20  # and for what only measuring needs


class Cards(FakeDriver):
    """Two made-up GPUs with memory of their own: contexts, allocations at different addresses, and graphs take some. A graph
    takes it on every device, as those of two ranks do."""

    def install(self, patch: pytest.MonkeyPatch) -> Cards:
        super().install(patch)
        self.current, self.blocks = 0, dict[int, tuple[int, int]]()  # address -> device, bytes
        for name, answer in {
            "cuDevicePrimaryCtxRetain": lambda handle: (driver.CUcontext(1 + int(handle)),),
            "cuCtxSetCurrent": self._activate,
            "cuMemAlloc": self._place,
            "cuMemFree": lambda address: (self.blocks.pop(int(address), None), ())[1],
            "cuMemGetAddressRange": lambda address: (address, self.blocks[int(address)][1]),
            "cuMemGetInfo": lambda: (self.total - self.used(self.current), self.total),
        }.items():
            patch.setattr(driver, name, self._call(name, answer))
        return self

    def used(self, device: int) -> int:
        graphs = self.names.count("cuGraphInstantiate") * self.graph_bytes
        return CONTEXT + graphs + sum(size for index, size in self.blocks.values() if index == device)

    def _activate(self, context: Any) -> tuple[()]:
        self.current = int(context) - 1
        return ()

    def _place(self, nbytes: int) -> tuple[Any, ...]:
        address = max((at + size for at, (_, size) in self.blocks.items()), default=1 << 20)
        self.blocks[-(-address // 4096) * 4096] = self.current, nbytes
        return (driver.CUdeviceptr(-(-address // 4096) * 4096),)


class Timed(Bench):
    """Measures nothing, but takes what measuring takes."""

    def __init__(self, backend: CudaBackend, seed: int) -> None:
        self.backend, self.program = backend, backend.program
        for device in backend.devices:
            device.allocate(MEASURING, "measuring")

    def read_rates(self) -> dict[str, float]:
        return {"read kernel": 4e12}

    def fill_caches(self) -> None:
        return None

    def decode(self, lanes: int, width: int, context: int, steps: int, repeats: int) -> DecodeTiming:
        return DecodeTiming([1e-3], 1e-5)

    def prefill(self, tokens: int, repeats: int) -> list[float]:
        return [1e-2]

    def first_token(self, tokens: int, repeats: int) -> list[float]:
        return [1e-3]


@pytest.mark.parametrize(("devices", "transport"), [("0", "auto"), ("0,1", "peer"), ("0,1", "host"), ("1,0", "staged"),
                                                    ("0,0", "peer"), ("1,1", "host")])  # fmt: skip
def test_rows_per_device(no_nvrtc: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: str,
                         transport: str) -> None:  # fmt: skip
    cards = Cards(count=2, graph_bytes=1 << 20).install(monkeypatch)
    monkeypatch.setattr("runtime.cuda.backend.choose", lambda program, modules, devices, wanted: wanted)
    monkeypatch.setattr("runtime.cuda.graph.GraphPhase._copy", lambda *args: driver.CUgraphNode(1))
    monkeypatch.setattr("runtime.bench.measure.Bench", Timed)
    folder, places = tmp_path / "program", [int(index) for index in devices.split(",")]
    options = ("--max-context", 384, "--prefill-chunk", 128, "--pairs", "1x1,1x24")
    assert run_cli("compile", models.artifact("dense-small").path, "-o", folder, "--devices", devices, *options).code == 0
    asked = ("-p", 64, "-n", 8, "-b", 1, "--devices", devices, "--transport", transport)
    result = run_cli("bench", folder, *asked, "-o", "json")
    assert result.code == 0, result.err
    assert not cards.blocks  # all is given back
    plan = json.loads(run_cli("plan", folder, "--devices", devices, "--json").text)["devices"]
    program, order = load(folder), list(dict.fromkeys(places))
    rows = [row for row in json.loads(result.text)["rows"] if " memory device " in row["case"]]
    assert all(set(row) == {"case", "metric", "value", "unit"} and row["unit"] == "B" for row in rows)
    case = f"dense-small/bf16 tp{program.tp} memory device"
    assert list(dict.fromkeys(row["case"] for row in rows)) == [f"{case} {index}" for index in order]
    for index in order:
        values = {row["metric"]: row["value"] for row in rows if row["case"] == f"{case} {index}"}
        ranks = [rank for rank, place in enumerate(places) if place == index]
        planned = sum(plan[rank]["planned"] for rank in ranks)
        mail = sum(program.regions[rank].get(EXCHANGE, 0) for rank in ranks)
        reserved = planned - (mail if transport == "host" else 0)
        graphs = len(program.phases) - (program.tp > 1)  # of two forms of a prefill chunk that of the transport
        loaded = reserved + graphs * cards.graph_bytes
        used = loaded + len(ranks) * MEASURING
        assert values == {"planned": planned, "planned with the driver's own": plan[ranks[0]]["needed"], "reserved": reserved,
                          "taken when loaded": loaded, "taken after use": used, "resident": CONTEXT + used}  # fmt: skip
        assert plan[ranks[0]]["needed"] == planned + DRIVER_BYTES and (mail > 0) == (program.tp > 1)
