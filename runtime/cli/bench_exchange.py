"""``ninferc bench exchange``: latency of the exchanges between two devices, as records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.cli import options as opt
from runtime.cli.errors import UsageError
from runtime.cli.io import Diagnostics


def bench_exchange(
    devices: Annotated[str, typer.Option("--devices", metavar="A,B", parser=opt.devices, help="a GPU for each rank")],
    transport: opt.Transport = None,
    columns: Annotated[str, typer.Option("-t", metavar="1,4,8,64", help="columns of an exchange")] = "1,4,8,64",
    count: Annotated[int | None, typer.Option("-n", metavar="N", parser=opt.integer("-n", 2, 4096),
                                              help="exchanges in one graph; default 128")] = None,  # fmt: skip
    output: Annotated[str, typer.Option("-o", parser=opt.one_of("-o", "table", "json"), help="table or json")] = "table",
    output_file: Annotated[Path | None, typer.Option("--output-file", metavar="FILE", help="write the record here")] = None,
) -> None:
    """Measure exchanges over every transport the pair has: FP32 and BF16, alone, behind products that push, and a chunk of
    prefill. Every received value is checked. --devices A,A is a test mode: both ranks on one GPU.
    """
    from runtime.bench.environment import describe, gpu_state
    from runtime.bench.exchange import CHUNK, run
    from runtime.cuda.device import Device
    from runtime.cuda.transport import TRANSPORTS

    pair = opt.read_devices(devices)
    if len(pair) != 2:
        raise UsageError(f"--devices {devices}: two are needed")
    try:
        widths = tuple(int(part) for part in columns.split(","))
    except ValueError:
        widths = ()
    if not widths or not all(1 <= width <= CHUNK for width in widths):
        raise UsageError(f"-t {columns[:40]!r}: column counts in 1…{CHUNK} are needed, such as 1,4,8,64")
    if pair[0] == pair[1]:
        Diagnostics().line(f"--devices {devices}: a test mode, both ranks on one GPU; nothing crosses a link")
    opened = [Device(index) for index in pair]
    try:
        record: dict[str, Any] = describe(opened)
    finally:
        for device in opened:
            device.close()
    record |= {"command": ["ninferc", *sys.argv[1:]], "tp": 2, "devices": list(pair), "transport": transport or "auto"}
    chosen = TRANSPORTS if transport in (None, "auto") else (transport,)
    rows: list[dict[str, Any]] = []
    for row in run(pair, widths, chosen, count or 128):
        added = "fused" in row.case or "behind" in row.case
        entry = {"case": row.case, "metric": "time added per exchange" if added and "unfused devices" not in row.case
                 else "time per exchange", "value": row.microseconds, "unit": "us", "bytes": row.nbytes}  # fmt: skip
        rows.append(entry)
        if row.launch:
            rows.append({"case": row.case, "metric": "launch call", "value": row.launch, "unit": "us"})
        if output == "table":
            print(f"{entry['case']:76s} {entry['metric']:24s} {entry['value']:10.2f} us", flush=True)
    record["rows"] = rows
    record["state_after"] = [gpu_state(index) for index in pair]
    text = json.dumps(record, indent=1)
    if output_file:
        output_file.write_text(text + "\n")
    if output == "json":
        print(text)
