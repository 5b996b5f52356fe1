"""The command line of `ninferc convert`: options reach the conversion, stdout stays empty, mistakes are usage errors."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import artifacts.container.artifact as container
from artifacts.errors import ArtifactError
from runtime.cli.convert import convert_command
from tests.convert import checkpoints as make


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(convert_command)
    return app


def test_options_reach_the_conversion(app: typer.Typer, tmp_path: Path) -> None:
    directory, out = make.write_checkpoint(tmp_path / "m", make.text_tensors()), tmp_path / "x.ninfer"
    command = [str(directory), "-o", str(out), "--model-id", "tiny", "--vocabulary", "Q6", "--threads", "1",
               "--override", "text/layers/1/mlp/*=W8G32_F16S", "--override", "mtp/input_projection=BF16"]  # fmt: skip
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and result.stdout == "" and "tiny / groupwise-int" in result.stderr
    artifact = container.open(out)
    formats = {name: artifact.tensor(name).format for name in artifact.objects if name.startswith(("text/", "mtp/"))}
    assert formats["text/output_head"] == "Q6G64_F16S" and formats["text/layers/1/mlp/down"] == "W8G32_F16S"
    assert formats["mtp/input_projection"] == "BF16" and formats["text/layers/2/mlp/down"] == "Q5G64_F16S"
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, ArtifactError) and "exists already" in str(again.exception)
    assert CliRunner().invoke(app, [*command, "--force"]).exit_code == 0


@pytest.mark.parametrize(
    "extra",
    [
        ["--vocabulary", "Q8"],
        ["--scale", "best"],
        ["--override", "x"],
        ["--override", "=W8"],
        ["--threads", "0"],
        ["--weights", "int4"],
    ],
)
def test_usage_errors(app: typer.Typer, tmp_path: Path, extra: list[str]) -> None:
    directory = make.write_checkpoint(tmp_path / "m", make.text_tensors())
    result = CliRunner().invoke(app, [str(directory), "-o", str(tmp_path / "x.ninfer"), *extra])
    assert result.exit_code == 2 and result.stdout == "" and not (tmp_path / "x.ninfer").exists()


def test_output_is_required(app: typer.Typer, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, [str(tmp_path)]).exit_code == 2
