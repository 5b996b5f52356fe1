"""The program: what a compile writes and a runtime replays. Data only; no GPU and no artifact are needed to read it."""
from compiler.program.model import Arg, ArtifactIdentity, Call, Phase, Placement, Program

__all__ = ["Arg", "ArtifactIdentity", "Call", "Phase", "Placement", "Program"]
