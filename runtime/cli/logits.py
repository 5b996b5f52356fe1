"""``ninferc logits``: teacher-forced logits of token ids as a NumPy file, written as they are computed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from runtime.cli import options as opt
from runtime.cli.errors import InputError
from runtime.cli.files import AtomicFile
from runtime.cli.load import Choices, Source
from runtime.cli.observe import open_diagnostics
from runtime.cli.prompt import read_ids
from runtime.session import RequestError, Session, check_ids


def npy_header(rows: int, columns: int) -> bytes:
    """Header of a C-ordered little-endian float32 array, format version 1.0 (numpy.lib.format)."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": (rows, columns)})
    return buffer.getvalue()


def logits(
    target: Annotated[Path, typer.Argument(metavar="PROGRAM|ARTIFACT", help="a program folder or a .ninfer file")],
    ids: Annotated[Path, typer.Option("--ids", metavar="FILE.json", help="token ids, a JSON array")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.npy", help="float32 array [tokens, vocabulary]")],
    device: opt.DeviceName = None,
    devices: opt.Devices = None,
    transport: opt.Transport = None,
    exchange: opt.Exchange = None,
    check_ranks: opt.CheckRanks = False,
    artifact: opt.ArtifactFile = None,
    arch: opt.Arch = None,
    card: opt.Card = None,
    max_context: opt.MaxContext = None,
    prefill_chunk: opt.PrefillChunk = None,
    no_cuda_graph: opt.NoGraph = False,
    numerics: opt.Numerics = None,
    rope: opt.Rope = None,
    kv_dtype: opt.KvDtype = None,
    yes: opt.Yes = False,
    log_level: opt.LogLevel = None,
) -> None:
    """Write the logits after every token of a sequence: row t belongs to the token that follows ids[0..t].

    Columns are the rows of the output head, padded ones included.
    """
    say = open_diagnostics(log_level)
    tokens = read_ids(ids)
    source = Source(target, Choices(artifact, device, arch, card, max_context, None, prefill_chunk, None, None, numerics,
                                    no_cuda_graph, yes, len(tokens), devices=devices,
                                    transport=transport, exchange=exchange, check_ranks=check_ranks), say)  # fmt: skip
    try:
        check_ids(tokens, source.limits)
    except RequestError as error:
        raise InputError(f"--ids {ids}: {error}") from None
    source.require_patience(len(tokens), 0)
    width = source.spec.vocab_rows
    with AtomicFile(output) as file:
        backend = source.load()
        try:
            file.write(npy_header(len(tokens), width))
            rows = 0
            with say.progress("scoring", len(tokens), "tokens") as bar:
                for chunk in Session(backend).score(tokens):
                    if chunk.shape[1:] != (width,):
                        raise InputError(f"the program gives {chunk.shape[1]} logits per token, the model has {width} rows")
                    file.write(np.ascontiguousarray(chunk, dtype="<f4").data.cast("B"))
                    rows += len(chunk)
                    bar.advance(len(chunk))
            backend.wait()
        finally:
            backend.close()
        source.ended()
    say.summary("tokens", rows)
    say.summary("logits", f"{rows} x {width} float32")
