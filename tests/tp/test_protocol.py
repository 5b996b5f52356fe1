"""The exchange protocol as a model: two ranks as threads, stores that become visible late and in any order.

Payloads travel as words that carry their number, sent by the exchange or ahead of it by the product, or as a slice: bytes
without numbers and a line that becomes visible only after them (release). Tiles are slices of which a payload has several, each
with a line: products send them one by one, in any order, while the rank's exchange may begin on what has arrived."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

import pytest

from compiler.ops.exchange_begin import number

COUNT = 12  # exchanges of one replay
LINE, BYTES = 100, 200  # cells of a slot: words from 0, the lines of slices, their bytes
TILE = 2  # words of a tile


@dataclass
class Mail:
    """Memory of one reader: two slots of cells. A store lands later, in any order between addresses, in order at one; one that
    releases cells lands after all stores to them that were made before it."""

    size: int
    rng: random.Random
    cells: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    flying: list[tuple[tuple[int, int], tuple[int, int], range]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def store(self, slot: int, index: int, word: tuple[int, int], release: range = range(0)) -> None:
        with self.lock:
            self.flying.append(((slot, index), word, release))

    def load(self, slot: int, index: int) -> tuple[int, int]:
        with self.lock:
            for _ in range(3):
                if self.flying and self.rng.random() < 0.7:
                    pick = self.rng.randrange(len(self.flying))
                    where = self.flying[pick][0]
                    first = next(i for i, (other, *_) in enumerate(self.flying) if other == where)
                    before = {index for (_, index), *_ in self.flying[:first]}
                    if before.isdisjoint(self.flying[first][2]):
                        self.cells[where] = self.flying.pop(first)[1]
            return self.cells.get((slot, index), (0, 0))

    def clear(self) -> None:
        with self.lock:
            self.cells.clear()
            self.flying.clear()


@dataclass
class Rank:
    """One rank's side; ``fault`` names a broken protocol that the tests must notice."""

    rank: int
    mail: list[Mail]  # by reader
    sizes: list[int]  # words of each exchange of a replay
    rng: random.Random
    fault: str = ""
    following: int = 2
    stop_after: int = 1 << 60  # exchanges after which this rank falls silent
    patience: float = 20.0
    done: int = 0
    form: str = "words"
    hung: bool = False
    wrong: list[str] = field(default_factory=list)

    @staticmethod
    def value(rank: int, count: int, index: int) -> int:
        return (rank * 1_000_003 + count * 7919 + index * 31) & 0xFFFFFFFF

    def replay(self) -> None:
        base, self.following = self.following, number(self.following, len(self.sizes))
        if self.fault == "zero not skipped":
            self.following = (base + len(self.sizes)) & 0xFFFFFFFF
        for ordinal, size in enumerate(self.sizes):
            if self.done >= self.stop_after:
                return
            if ordinal == 0 or self.fault != "pushed too early":
                self._send(base, ordinal, self.done)
            if self.fault == "pushed too early" and ordinal + 1 < len(self.sizes):
                self._send(base, ordinal + 1, self.done + 1)  # the next product does not wait for this exchange
            if self.rng.random() < 0.1:
                time.sleep(0.0002)
            if not self._receive(base, ordinal, size):
                self.hung = True
                return
            self.done += 1

    def _place(self, base: int, ordinal: int) -> tuple[int, int]:
        """Number and slot."""
        sequence = number(base, ordinal)
        if self.fault == "zero not skipped":
            sequence = (base + ordinal) & 0xFFFFFFFF
        return sequence, 0 if self.fault == "slot baked in" else sequence % 2

    def _send(self, base: int, ordinal: int, count: int) -> None:
        (sequence, slot), size, mail = self._place(base, ordinal), self.sizes[ordinal], self.mail[1 - self.rank]
        if self.form == "words":
            for index in self.rng.sample(range(size), size):
                mail.store(slot, index, (self.value(self.rank, count, index), sequence))
            return
        slices = self._slices(size)
        for number_of in self.rng.sample(range(len(slices)), len(slices)):
            line = LINE + number_of
            if self.fault == "tiles swapped":
                line = LINE + len(slices) - 1 - number_of
            if self.fault == "line before its bytes":
                mail.store(slot, line, (0, sequence))
            for index in slices[number_of]:
                mail.store(slot, BYTES + index, (self.value(self.rank, count, index), 0))
            covered = range(BYTES + slices[number_of].start, BYTES + slices[number_of].stop)
            mail.store(slot, line, (0, sequence), range(0) if self.fault == "line without release" else covered)
            if self.form == "tiles" and self.rng.random() < 0.1:
                time.sleep(0.0002)  # the product goes on

    def _slices(self, size: int) -> list[range]:
        """Words of each line."""
        step = TILE if self.form == "tiles" else size
        return [range(begin, min(begin + step, size)) for begin in range(0, size, step)]

    def _receive(self, base: int, ordinal: int, size: int) -> bool:
        (sequence, slot), mail = self._place(base, ordinal), self.mail[self.rank]
        deadline = time.monotonic() + self.patience
        slices = [range(index, index + 1) for index in range(size)] if self.form == "words" else self._slices(size)
        for line, indices in enumerate(slices):
            awaited = self.fault != "one line awaited" or line == 0
            while awaited:
                value, stamp = mail.load(slot, line if self.form == "words" else LINE + line)
                if stamp == sequence or (self.fault == "sequence not checked" and stamp):
                    break
                if self.hung or time.monotonic() > deadline:
                    return False
            for index in indices:
                self._look(index, value if self.form == "words" else mail.load(slot, BYTES + index)[0])
        return True

    def _look(self, index: int, value: int) -> None:
        if value != self.value(1 - self.rank, self.done, index):
            self.wrong.append(f"exchange {self.done} cell {index}")


def pair(seed: int, fault: str = "", start: int = 2, patience: float = 20.0, form: str = "words") -> list[Rank]:
    rng = random.Random(seed)
    sizes = [rng.choice([1, 3, 9]) for _ in range(COUNT)]
    mail = [Mail(9, random.Random(seed + i)) for i in range(2)]
    return [Rank(r, mail, sizes, random.Random(seed + 10 + r), fault, start, patience=patience, form=form)
            for r in range(2)]  # fmt: skip


def run(ranks: list[Rank], replays: int) -> None:
    def body(rank: Rank) -> None:
        for _ in range(replays):
            if not rank.hung:
                rank.replay()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("start", [2, (1 << 32) - 30])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", ["words", "slices", "tiles"])
def test_every_value_is_the_right_one(form: str, seed: int, start: int) -> None:
    """Across replays, across the wrap of the sequence, with ranks that drift apart by up to one exchange."""
    ranks = pair(seed, start=start, form=form)
    run(ranks, 8)
    for rank in ranks:
        assert rank.wrong == [] and not rank.hung and rank.done == 8 * COUNT
    assert ranks[0].following == ranks[1].following


@pytest.mark.parametrize(("fault", "form"), [
    ("slot baked in", "words"), ("sequence not checked", "words"), ("slot baked in", "slices"),
    ("sequence not checked", "slices"), ("line before its bytes", "slices"), ("line without release", "slices"),
    ("pushed too early", "words"), ("pushed too early", "tiles"), ("slot baked in", "tiles"),
    ("line before its bytes", "tiles"), ("line without release", "tiles"), ("tiles swapped", "tiles"),
    ("one line awaited", "tiles")])  # fmt: skip
def test_the_model_notices_broken_protocols(fault: str, form: str) -> None:
    noticed = False
    for seed in range(12):
        ranks = pair(seed, fault, patience=0.2, form=form)
        run(ranks, 6)
        noticed = any(rank.wrong or rank.hung for rank in ranks)
        if noticed:
            break
    assert noticed


def test_zero_would_be_taken_from_cleared_memory() -> None:
    """Number 0 equals what cleared memory holds: the reader would take zeros for data. Hence it is skipped."""
    noticed = False
    for seed in range(12):
        ranks = pair(seed, "zero not skipped", start=(1 << 32) - 4, patience=0.3)
        for rank in ranks:
            rank.sizes = [1] * 4 + [9] * 8  # the exchange of number 0 is the first to use most words of its slot
        run(ranks, 1)
        noticed = noticed or any(rank.wrong for rank in ranks)
    assert noticed


@pytest.mark.parametrize("form", ["words", "slices", "tiles"])
def test_dropped_peer_and_restart(form: str) -> None:
    """A rank that falls silent is noticed in time; after both sides agree on a number and clear, all goes on."""
    ranks = pair(5, patience=0.2, form=form)
    ranks[1].stop_after = 2 * COUNT + 5
    began = time.monotonic()
    run(ranks, 6)
    assert ranks[0].hung and time.monotonic() - began < 5
    assert ranks[0].done <= 2 * COUNT + 6 and ranks[0].wrong == []
    following = max(rank.following for rank in ranks)
    for rank in ranks:
        for mail in rank.mail:
            mail.clear()
        rank.hung, rank.stop_after, rank.following, rank.patience = False, 1 << 60, following, 20.0
        rank.done = 1000
    run(ranks, 3)
    assert [rank.done for rank in ranks] == [1000 + 3 * COUNT] * 2 and not any(rank.wrong for rank in ranks)
