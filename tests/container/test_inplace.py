"""migrate and relabel: a crash after any prefix of the writes leaves the old or the new file, and a re-run completes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import artifacts
from artifacts import ArtifactWriter, Identity
from artifacts.container.directory_v2 import encode_directory
from artifacts.container.schema import place
from artifacts.errors import ArtifactError, IdentityError, OutputError
from artifacts.identities.registry import REGISTRY, registered
from artifacts.tools.inplace import Disk
from artifacts.tools.migrate import BACKUP_SUFFIX, migrate
from artifacts.tools.relabel import BACKUP_SUFFIX as RELABEL_SUFFIX
from artifacts.tools.relabel import relabel
from tests.container.samples import write_v1, write_v2


class Crash(Exception):
    pass


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The crashes are simulated above the operating system, so waiting for the device proves nothing."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


class CrashingDisk(Disk):
    """Counts bytes and operations, and stops in the middle of the operation where the budget ends.

    One unit is one byte written, one rename, one removal. `scatter`: the interrupted write leaves a random choice of
    its 512-byte sectors instead of a prefix, as a disk without ordering would.
    """

    def __init__(self, budget: int, scatter: np.random.Generator | None = None) -> None:
        self.budget = budget
        self.scatter = scatter
        self.costs: list[int] = []  # of the operations begun, in order

    def _spend(self, cost: int) -> None:
        self.costs.append(cost)
        self.budget -= cost
        if self.budget < 0:
            raise Crash

    def create(self, path: Path, data: bytes) -> None:
        kept = data[: max(0, self.budget)]
        super().create(path, kept)
        self._spend(len(data) + 1)

    def overwrite(self, path: Path, offset: int, data: bytes) -> None:
        if self.budget < len(data):
            if self.scatter is None or len(data) <= 16:
                pieces = [(0, data[: max(0, self.budget)])]
            else:
                starts = range(0, len(data), 512)
                pieces = [(s, data[s : s + 512]) for s in starts if self.scatter.random() < 0.5]
            for start, piece in pieces:
                super().overwrite(path, offset + start, piece)
        else:
            super().overwrite(path, offset, data)
        self._spend(len(data))

    def rename(self, old: Path, new: Path) -> None:
        self._spend(1)
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._spend(1)
        super().remove(path)


def _costs(path: Path, run: Callable[[Path, Disk], object]) -> list[int]:
    """Units of every operation of a whole run."""
    disk = CrashingDisk(1 << 40)
    run(path, disk)
    return disk.costs


def _state(path: Path) -> tuple[str, bytes]:
    with artifacts.open(path) as artifact:
        return f"{artifact.version} {artifact.identity}", artifact.read(0, artifact.payload_bytes).tobytes()


def _budgets(costs: list[int], step: int, short: int = 80) -> list[int]:
    """Before and after every operation and inside it: each of the first `short` bytes, then every `step` bytes."""
    budgets, start = set(), 0
    for cost in costs:
        inside = (*range(min(cost, short)), *range(0, cost, step))
        budgets |= {start + at for at in (*inside, 1, cost - 1)}
        start += cost
    return sorted(budget for budget in budgets if budget < start)


def _crash_everywhere(
    original: Path, suffix: str, run: Callable[[Path, Disk | None], object], old: str, new: str, step: int
) -> None:
    work = original.with_name("work.ninfer")
    payload = _state(original)[1]
    shutil.copyfile(original, work)
    costs = _costs(work, run)
    assert len(costs) == 6  # save, name the backup, spoil the length, the directory, the prefix, remove the backup
    outcomes = set()
    for budget in _budgets(costs, step):
        shutil.copyfile(original, work)
        with pytest.raises(Crash):
            run(work, CrashingDisk(budget))
        identity, content = _state(work)  # readable at every moment, as what it was or as what it becomes
        assert identity in (old, new) and content == payload, budget
        outcomes.add(identity)
        assert work.stat().st_size == original.stat().st_size
        run(work, None)
        assert _state(work) == (new, payload), budget
        assert not work.with_name(work.name + suffix).exists()
        assert not work.with_name(work.name + suffix + ".partial").exists()
    assert outcomes == {old, new}


def _migrate(path: Path, disk: Disk | None) -> object:
    return migrate(path, disk=disk)


def _relabel(path: Path, disk: Disk | None) -> object:
    return relabel(path, "other-weights", disk=disk)


def _relabel_equal_length(path: Path, disk: Disk | None) -> object:
    return relabel(path, "WXYZ", disk=disk)


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_migrate_survives_a_crash_at_every_write(tmp_path: Path, step: int) -> None:
    original = write_v1(tmp_path / "v1.ninfer")
    _crash_everywhere(original, BACKUP_SUFFIX, _migrate, "1 old-model", "2 old-model/groupwise-int", step)


@pytest.mark.parametrize("step", [128, pytest.param(8, marks=pytest.mark.slow)])
def test_relabel_survives_a_crash_at_every_write(tmp_path: Path, step: int) -> None:
    original = write_v2(tmp_path / "v2.ninfer", "bf16")
    _crash_everywhere(original, RELABEL_SUFFIX, _relabel, "2 sample/bf16", "2 sample/other-weights", step)


def test_a_mixture_of_two_directories_is_never_read(tmp_path: Path) -> None:
    """With ids of equal length every prefix of the new directory before the rest of the old one is valid JSON."""
    original = write_v2(tmp_path / "v2.ninfer", "bf16")
    _crash_everywhere(original, RELABEL_SUFFIX, _relabel_equal_length, "2 sample/bf16", "2 sample/WXYZ", 1 << 12)


def test_a_second_crash_while_the_first_is_undone(tmp_path: Path) -> None:
    """Every pair of operations: stop before or after one, run again, stop before or after one of that run."""
    original = write_v1(tmp_path / "v1.ninfer")
    payload, work = _state(original)[1], tmp_path / "work.ninfer"
    shutil.copyfile(original, work)
    pairs = 0
    for first in _budgets(_costs(work, _migrate), 1 << 20, short=0):
        shutil.copyfile(original, work)
        with pytest.raises(Crash):
            migrate(work, disk=CrashingDisk(first))
        saved = {path: path.read_bytes() for path in tmp_path.iterdir()}
        for second in _budgets(_costs(work, _migrate), 1 << 20, short=0):
            for path in set(tmp_path.iterdir()) - set(saved):
                path.unlink()
            for path, content in saved.items():
                path.write_bytes(content)
            with pytest.raises(Crash):
                migrate(work, disk=CrashingDisk(second))
            assert _state(work)[1] == payload
            migrate(work)
            assert _state(work) == ("2 old-model/groupwise-int", payload), (first, second)
            pairs += 1
        for path in set(tmp_path.iterdir()) - {original}:
            path.unlink()
    assert pairs > 100


def test_crash_during_recovery_and_scattered_sectors(tmp_path: Path) -> None:
    original = write_v1(tmp_path / "v1.ninfer")
    payload = _state(original)[1]
    work = tmp_path / "work.ninfer"
    rng = np.random.default_rng(3)
    shutil.copyfile(original, work)
    total = sum(_costs(work, _migrate))
    for _ in range(60):
        shutil.copyfile(original, work)
        for _ in range(3):  # interrupted, and interrupted again while recovering
            try:
                migrate(work, disk=CrashingDisk(int(rng.integers(0, 2 * total)), rng))
            except Crash:
                pass
            assert _state(work)[0] in ("1 old-model", "2 old-model/groupwise-int")
        migrate(work)
        assert _state(work) == ("2 old-model/groupwise-int", payload)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["v1.ninfer", "work.ninfer"]


def test_migrate_changes_metadata_only(tmp_path: Path) -> None:
    path = write_v1(tmp_path / "a.ninfer")
    before = path.read_bytes()
    dry = migrate(path, dry_run=True)
    assert path.read_bytes() == before and not dry.already
    result = migrate(path)
    after = path.read_bytes()
    assert result.identity == ("old-model", "groupwise-int") and result.payload_start == 4096
    assert after[4096:] == before[4096:] and len(after) == len(before)
    assert after[:8] == bytes.fromhex("4e494e4645520002")
    assert result.new_directory_bytes == result.old_directory_bytes + 42
    again = migrate(path)
    assert again.already and path.read_bytes() == after
    other = write_v1(tmp_path / "b.ninfer")
    assert migrate(other, "something").identity == ("old-model", "something")


def test_migrate_refuses_to_move_the_payload(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    frame = len(encode_directory(Identity("m"), place([artifacts.ObjectPlan("n", bytes=1)])))
    name = "n" * (4096 - 16 - 41 - frame + 1)  # one byte less and the 42 new bytes would fit
    with ArtifactWriter(path, Identity("m"), [artifacts.ObjectPlan(name, bytes=1)]) as writer:
        writer.write(name, b"x")
    before = path.read_bytes()
    with pytest.raises(OutputError, match="would move the payload from 4096 to 8192"):
        migrate(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.ninfer"]


def test_migrate_of_registered_models(tmp_path: Path) -> None:
    entry = registered(Identity("qwen3.6-27b", "groupwise-int"))
    path = tmp_path / "a.ninfer"
    with ArtifactWriter(path, Identity("qwen3.6-27b"), entry.plan(), sparse=True):
        pass
    with pytest.raises(IdentityError, match="SHA-256 .* is not that of the published|directory is not the published"):
        migrate(path, require_published=True, dry_run=True, progress=_stop_after(1 << 25))
    with pytest.raises(IdentityError, match="must be groupwise-int"):
        migrate(path, "nvfp4")
    result = migrate(path)
    assert (result.old_directory_bytes, result.new_directory_bytes, result.payload_start) == (174176, 174218, 176128)
    assert path.stat().st_size == entry.file_bytes
    with artifacts.open(path) as artifact:
        assert artifact.directory_digest == "0abb85fde318b5980c126f9c44a5bae09e852034de79ea269bd09693aa34e7f7"


def _stop_after(limit: int) -> Callable[[int, int], None]:
    """The whole-file checksum of a sparse 17 GB file is not worth its time: past `limit` it counts as different."""

    def progress(done: int, total: int) -> None:
        if done > limit:
            raise IdentityError("SHA-256 (cut short) is not that of the published file")

    return progress


def test_migrate_demands_the_published_inventory(tmp_path: Path) -> None:
    entry = registered(Identity("qwen3.6-35b-a3b", "groupwise-int"))
    for position, match in ((-1, "939 objects"), (700, "differs from")):
        plans = entry.plan()
        del plans[position]
        path = tmp_path / f"{position}.ninfer"
        with ArtifactWriter(path, Identity("qwen3.6-35b-a3b"), plans, sparse=True):
            pass
        with pytest.raises(IdentityError, match=match):
            migrate(path)
    path = tmp_path / "longer.ninfer"
    with ArtifactWriter(path, Identity("qwen3.6-35b-a3b"), entry.plan(), sparse=True):
        pass
    with open(path, "ab") as file:
        file.write(b"1234")
    with pytest.raises(IdentityError, match="4 bytes follow the last object"):
        migrate(path)


def test_migrate_rejects_other_files(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    path.write_bytes(b"NINFER\0\x03" + bytes(100))
    with pytest.raises(ArtifactError):
        migrate(path)
    path.write_bytes(b"junk")
    with pytest.raises(ArtifactError):
        migrate(path)
    write_v1(tmp_path / "b.ninfer")
    stray = tmp_path / ("b.ninfer" + BACKUP_SUFFIX)
    stray.write_bytes(b"not a backup")
    with pytest.raises(OutputError, match="is not a backup of 'b.ninfer'"):
        migrate(tmp_path / "b.ninfer")
    assert stray.read_bytes() == b"not a backup"


def test_a_backup_of_another_file_is_not_used(tmp_path: Path) -> None:
    path = write_v1(tmp_path / "a.ninfer")
    raw = path.read_bytes()
    backup = tmp_path / ("a.ninfer" + BACKUP_SUFFIX)
    path.write_bytes(bytes(16) + raw[16:4096])  # too short for the objects of the backup
    backup.write_bytes(raw[:4096])
    with pytest.raises(ArtifactError, match="the payload has"):
        artifacts.open(path)


def test_migrate_keeps_symlinks(tmp_path: Path) -> None:
    target = write_v1(tmp_path / "real.ninfer")
    link = tmp_path / "link.ninfer"
    link.symlink_to(target)
    migrate(link)
    assert link.is_symlink()
    with artifacts.open(target) as artifact:
        assert artifact.version == 2


def test_relabel_split_by_objects(tmp_path: Path) -> None:
    entry = registered(Identity("qwen3.8-27b", "nvfp4-split"))
    path = tmp_path / "a.ninfer"
    with ArtifactWriter(path, Identity("qwen3.8-27b", "nvfp4"), entry.plan(), sparse=True):
        pass
    size = path.stat().st_size
    with artifacts.open(path) as artifact:
        assert artifact.model.registered is entry and artifact.directory_bytes == 206636
    assert relabel(path, dry_run=True).after == entry.identity
    with artifacts.open(path) as artifact:
        assert artifact.identity.weights_id == "nvfp4"
    result = relabel(path)
    assert (result.before.weights_id, result.after.weights_id) == ("nvfp4", "nvfp4-split")
    with artifacts.open(path) as artifact:
        assert artifact.identity == entry.identity and artifact.model.registered is entry
        assert artifact.directory_digest == "a67aa69b2f37cd2f4f9206409081fb6d6b091df686714553230fac0f958dd059"
    assert path.stat().st_size == size == entry.file_bytes
    assert relabel(path).before == entry.identity
    with pytest.raises(IdentityError, match="objects are not those of qwen3.8-27b/groupwise-int"):
        relabel(path, "groupwise-int")
    assert relabel(path, "nvfp4-split").after == relabel(path).after


def test_relabel_refusals(tmp_path: Path) -> None:
    entry = REGISTRY[Identity("qwen3.8-27b", "nvfp4")]
    path = tmp_path / "a.ninfer"
    with ArtifactWriter(path, entry.identity, entry.plan(), sparse=True):
        pass
    assert relabel(path).before == relabel(path).after == entry.identity  # the upstream schema keeps its name
    with pytest.raises(IdentityError, match="not those of qwen3.8-27b/nvfp4-split"):
        relabel(path, "nvfp4-split")
    with pytest.raises(OutputError, match="would move the payload"):
        relabel(path, "x" * 5000)
    with pytest.raises(IdentityError, match="only version 2"):
        relabel(write_v1(tmp_path / "v1.ninfer"), "x")
    with pytest.raises(IdentityError, match="name the new weights id"):
        relabel(write_v2(tmp_path / "v2.ninfer"))
