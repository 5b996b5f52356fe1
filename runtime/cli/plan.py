"""``ninferc plan``: memory per region and device and the predicted time, before anything is compiled or loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from compiler.driver import compile_program, limits_of, model_of
from compiler.explain.cost import phase_seconds
from compiler.explain.memory import amount, device_memory, exchange_bytes, host_bytes, total_bytes
from compiler.explain.roofline import Rates, rates
from compiler.program.io import load
from compiler.program.model import Phase, Program
from runtime.cli import options as opt
from runtime.cli.capacity import DRIVER_BYTES
from runtime.cli.errors import UsageError
from runtime.cli.io import Diagnostics, Output
from runtime.cli.load import compile_options, open_artifact
from runtime.cli.target import Place, choose_place, compile_place, compile_target, count_devices
from runtime.cuda.driver import DeviceError


def plan(
    target: Annotated[Path, typer.Argument(metavar="PROGRAM|ARTIFACT", help="a program folder or a .ninfer file")],
    arch: opt.Arch = None,
    card: opt.Card = None,
    tp: opt.Tp = None,
    devices: opt.Devices = None,
    exchange: opt.Exchange = None,
    max_context: opt.MaxContext = None,
    max_concurrency: opt.MaxConcurrency = None,
    prefill_chunk: opt.PrefillChunk = None,
    pairs: opt.Pairs = None,
    kv_capacity: opt.KvCapacity = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Show what a program will need and how fast it can be at best. Nothing is compiled, no weight is read.

    With a GPU for every rank and no --arch the plan is compared with their free memory; exit code 3 when it does not fit.
    """
    say = Diagnostics()
    named, ranks = compile_place(arch, tp, devices)
    place = named or (choose_place(None) if arch in (None, "native") else Place())
    if target.is_dir():
        given = {"--arch": arch, "--as": card, "--tp": tp, "--exchange": exchange, "--max-context": max_context,
                 "--max-concurrency": max_concurrency, "--prefill-chunk": prefill_chunk, "--pairs": pairs,
                 "--kv-capacity": kv_capacity}  # fmt: skip
        fixed = next((name for name, value in given.items() if value is not None), None)
        if fixed is not None:
            raise UsageError(f"{fixed} is fixed in a program; plan its artifact to change it")
        program = load(target)
        if named is not None and ranks != program.tp:
            raise UsageError(f"--devices {devices}: the program has {program.tp} rank(s), one device each")
    else:
        with open_artifact(target, say) as artifact:
            spec = model_of(artifact)
            options = compile_options(spec, max_context, max_concurrency, prefill_chunk, kv_capacity,
                                      opt.read_pairs(pairs) if pairs else (), ranks, exchange)  # fmt: skip
            limits_of(spec, options)
            caps = compile_target(arch, card, place)
            program = compile_program(artifact, caps, options, images=False)
            if place.reason and card is None:
                say.line(f"{place.reason}: planning for {caps.arch}; --arch or --as names another target")
    report = plan_report(program, [_device(index) for index in _places(place, named, program.tp)])
    Output().write((json.dumps(report) if as_json else "\n".join(_lines(report))) + "\n")
    for rank, device in enumerate(report["devices"]):
        if device.get("fits") is False:
            raise DeviceError(f"device {rank} ({device['name']}): {amount(device['needed'])} are needed, "
                              f"{amount(device['free'])} are free; lower --max-context or --max-concurrency")  # fmt: skip


def _places(place: Place, named: Place | None, ranks: int) -> tuple[int, ...]:
    """Devices to compare with: those named, else the first ones where every rank has one."""
    if named is not None or place.cpu or ranks == 1:
        return place.devices
    return tuple(range(ranks)) if count_devices() >= ranks else ()


def _device(index: int) -> dict[str, Any]:
    from runtime.cuda.device import Device

    device = Device(index)
    try:
        info = device.info()
        return {"index": index, "name": info.name, "free": info.free, "total": info.total}
    finally:
        device.close()


def plan_report(program: Program, devices: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan as plain data: bytes and seconds. ``devices``: index, name, free and total of each rank's GPU, where known; of
    ranks that share one the sum must fit."""
    at = rates(program.caps)
    ranks: list[dict[str, Any]] = []
    for rank, uses in enumerate(device_memory(program)):
        entry: dict[str, Any] = {"memory": uses, "planned": total_bytes(program, rank),
                                 "needed": total_bytes(program, rank) + DRIVER_BYTES}  # fmt: skip
        if rank < len(devices):
            here = devices[rank]
            beside = [r for r in range(program.tp) if r != rank and devices[r]["index"] == here["index"]]
            entry["needed"] += sum(total_bytes(program, r) for r in beside)
            entry |= here | {"fits": entry["needed"] <= here["free"]}
        ranks.append(entry)
    limits = program.limits
    return {
        "artifact": {"model_id": program.artifact.model_id, "weights_id": program.artifact.weights_id,
                     "file_bytes": program.artifact.file_bytes},
        "target": {"arch": program.caps.arch, "sms": program.caps.sms}, "tp": program.tp,
        "limits": {"lanes": limits.lanes, "max_context": limits.max_context, "prefill_chunk": limits.chunk,
                   "kv_pages": limits.pages},
        "devices": ranks,
        "host_bytes": host_bytes(program), "host_exchange_bytes": exchange_bytes(program),
        "rates": {"card": at.card, "bytes_per_second": at.bandwidth, "flops": at.flops, "measured": at.measured},
        "phases": [row for phase in program.phases.values() for row in _phase_rows(program, phase, at)],
    }  # fmt: skip


def _phase_rows(program: Program, phase: Phase, at: Rates) -> list[dict[str, Any]]:
    """Least time of a replay with a short and with a full cache, and the tokens per second it would give."""
    context = program.limits.max_context
    if phase.phase == "decode":
        depths = sorted({min(1024, context), context})
        tokens = phase.columns
    else:  # a causal chunk sees on average half of itself besides what is before it
        width = min(phase.width, context)
        depths = sorted({max(width // 2, 1), max(context - width // 2, 1)})
        tokens = width
    out = []
    for keys in depths:
        seconds = phase_seconds(program, phase, keys, at)
        out.append({"phase": phase.name, "lanes": phase.lanes, "columns": phase.width, "keys": keys, "seconds": seconds,
                    "tokens_per_second": tokens / seconds, "calls": len(phase.calls)})  # fmt: skip
    return out


def _lines(report: dict[str, Any]) -> list[str]:
    artifact, target, limits, at = report["artifact"], report["target"], report["limits"], report["rates"]
    names = " / ".join(text for text in (artifact["model_id"], artifact["weights_id"]) if text) or "unnamed"
    lines = [
        f"{'artifact':22} {names if names.isprintable() else ascii(names)}, {amount(artifact['file_bytes'])}",
        f"{'target':22} {target['arch']}, {target['sms']} multiprocessors"
        + (f", {report['tp']} ranks" if report["tp"] > 1 else ""),
        f"{'limits':22} {limits['lanes']} lane(s), context {limits['max_context']}, prefill chunk {limits['prefill_chunk']}, "
        f"{limits['kv_pages']} KV pages",
    ]
    for rank, device in enumerate(report["devices"]):
        lines += [f"{f'device {rank} {use}':22} {amount(size)}" for use, size in device["memory"].items()]
        planned = f"{amount(device['planned'])}, and about {amount(DRIVER_BYTES)} for the driver"
        lines.append(f"{f'device {rank} planned':22} {planned}")
        if "free" in device:
            fits = "fits" if device["fits"] else "does not fit"
            free = f"{amount(device['free'])} of {amount(device['total'])} on {device['name']}: {fits}"
            lines.append(f"{f'device {rank} free':22} {free}")
    host = amount(report["host_bytes"])
    if report["host_exchange_bytes"]:
        host += f"; where exchanges go through the host also {amount(report['host_exchange_bytes'])}, which the devices save"
    lines.append(f"{'host page-locked':22} {host}")
    basis = "measured" if at["measured"] else "from vendor figures"
    lines.append(f"{'rates':22} {at['card']}: {at['bytes_per_second'] / 1e12:.3g} TB/s ({basis}), "
                 f"{at['flops'] / 1e12:.4g} TFLOP/s")  # fmt: skip
    for row in report["phases"]:
        unit, scale = ("us", 1e6) if row["seconds"] < 1e-2 else ("ms", 1e3)
        lines.append(f"{row['phase'] + ' at ' + str(row['keys']):22} at least {row['seconds'] * scale:.1f} {unit}, "
                     f"at most {row['tokens_per_second']:.4g} tokens/s")  # fmt: skip
    return lines
