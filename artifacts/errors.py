"""The closed set of errors that the artifact library raises.

Every error is one line that names the file, object, tensor or option and what is allowed. The command line maps
`ArtifactError` to exit code 1. Programming mistakes (a wrong argument type in a call) stay ordinary Python errors.
"""


class ArtifactError(Exception):
    """Base of everything that can be wrong with an artifact, a checkpoint or the files around them."""


class FramingError(ArtifactError):
    """The file is not a `.ninfer` container: too short, wrong magic, impossible directory length, wrong file length."""


class DirectoryError(ArtifactError):
    """The JSON directory is not valid: encoding, syntax, duplicate or unknown members, domains, limits."""


class GeometryError(ArtifactError):
    """Object or part ranges overlap, are misaligned or leave the payload."""


class FormatError(ArtifactError):
    """An unknown numeric format, or values that a format cannot hold."""


class LayoutError(ArtifactError):
    """An unknown layout, a format or shape that the layout does not accept, or a wrong encoded size."""


class PartError(ArtifactError):
    """A continuation part of a version 3 artifact is missing or does not belong to it."""


class IdentityError(ArtifactError):
    """The model identity is unknown, or the object list is not the one that the identity prescribes."""


class ConfigError(ArtifactError):
    """A model configuration is missing, incomplete or describes a model outside the supported family."""


class PayloadError(ArtifactError):
    """Stored bytes break a rule of their format: illegal scale, code, divisor or padding."""


class OutputError(ArtifactError):
    """An output cannot be written: it exists, the plan was not fulfilled, the disk is full."""


class DownloadError(ArtifactError):
    """A download failed: network, size, checksum, unknown file."""


def quoted(text: object, limit: int = 80) -> str:
    """Text from a file made safe for a one-line message: ASCII, escaped, shortened to `limit` characters."""
    plain = text if isinstance(text, str) else repr(text)
    shown = ascii(plain[: limit + 1])[1:-1]
    return f"'{shown[:limit]}...'" if len(shown) > limit else f"'{shown}'"


def quoted_path(path: object) -> str:
    """A path as `quoted`, in full: what tells two paths apart is often their end."""
    return quoted(str(path), 4096)
