"""Who leads a group of rows, in words: for our own boards and for any CSV."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbench.stats.rank_intervals import Ranking

NAMED = 4  # rows that a sentence names; of more, it says how many others


@dataclass(frozen=True, kw_only=True)
class RankedGroup:
    """Rows that common columns connect, the best rank first, and their ranks over these columns."""

    names: list[str]
    title: str  # the columns in a sentence: "all 7 measurements"
    basis: str  # what the intervals are for: "for other datasets like these 12"
    standing: Ranking
    met: np.ndarray  # (rows, rows): whether two rows have a column in common

    @property
    def leaders(self) -> list[int]:
        """The indices of the rows that nobody is shown to be above, in the order of the rows."""
        return sorted(self.standing.leaders)

    @property
    def is_decided(self) -> bool:
        """True if one row leads alone."""
        return len(self.leaders) == 1

    @property
    def begins_with_name(self) -> bool:
        """True if `clause` begins with a checkpoint's name, whose letters stay as they are."""
        return len(self.leaders) < len(self.names)

    def interval(self, index: int, between: str) -> str:
        """Return the ends of a row's interval, as `1-4`; one number if they are equal."""
        low, high = self.standing.places[index].interval
        return str(low) if low == high else f"{low}{between}{high}"

    def clause(self) -> str:
        """Say who leads, with what confidence, or that nobody does."""
        leaders = self.leaders
        total = len(self.names)
        if len(leaders) == total:
            return self._nobody()
        if len(leaders) == 1:
            (first,) = leaders
            rank = f"rank {self.interval(first, ' to ')} of {total}"
            return (
                f"{self.names[first]} leads alone over {self.title}: {rank} with 95%"
                f" confidence, {self.basis}{self._unmet()}"
            )
        said = "and cannot be told apart"
        if not self._any_met(leaders):
            said = "and were never measured together"
        elif not self._all_met(leaders):
            said = "and were not all measured together"
        who = some([self.names[index] for index in leaders])
        return (
            f"{who} lead the {total} over {self.title} {said}, with 95% confidence"
            f" {self.basis}{self._unmet()}"
        )

    def _nobody(self) -> str:
        """Say that nobody leads, and why. Rows that were not tested, or share no column, are not said
        to be alike."""
        whom = everybody(self.names)
        if not self.standing.tested:
            said = (
                f"no verdict on {whom} over {self.title}: too little was measured, trained again or"
                " kept to test them"
            )
        elif self._all_met(self.leaders):
            said = f"no clear winner: {whom} cannot be told apart over {self.title}"
        else:
            said = f"no clear winner among {whom} over {self.title}"
        return said + self._unmet()

    def _any_met(self, indices: Sequence[int]) -> bool:
        among = self.met[np.ix_(indices, indices)]
        return bool(np.triu(among, 1).any())

    def _all_met(self, indices: Sequence[int]) -> bool:
        return bool(self.met[np.ix_(indices, indices)].all())

    def _unmet(self) -> str:
        """Name the rows that the leaders were never measured with."""
        leaders = self.leaders
        if len(leaders) > 1 and not self._any_met(leaders):
            # The sentence says already that they were never measured together.
            return ""
        for index in leaders:
            apart = np.flatnonzero(~self.met[index])
            # Of two leaders that were never measured together, only the first names the other
            others = [n for n in apart if n not in leaders or n > index]
            if others:
                without = some([self.names[n] for n in others])
                return f"; {self.names[index]} was never measured with {without}"
        return ""


def listed(names: Sequence[str]) -> str:
    """Return names in a sentence: `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def counted(count: int, one: str, several: str) -> str:
    """Return a count with its noun: `1 other`, `2 others`."""
    return f"{count} {one if count == 1 else several}"


def some(names: Sequence[str]) -> str:
    """Return at most NAMED of the names in a sentence, and how many others there are."""
    if len(names) <= NAMED:
        return listed(names)
    others = counted(len(names) - NAMED, "other", "others")
    return listed([*names[:NAMED], others])


def capitalised(text: str) -> str:
    """Return a text whose first letter is a capital; the others stay as they are."""
    return f"{text[0].upper()}{text[1:]}"


def everybody(names: Sequence[str]) -> str:
    """Return all names in a sentence, or their number if they are many."""
    return listed(names) if len(names) <= NAMED else f"the {len(names)} checkpoints"


def in_braces(names: Sequence[str], most: int = 3) -> str:
    """Return a group as one word of a sentence: `a`, `{a, b}` or `{a and 5 others}`."""
    if len(names) == 1:
        return names[0]
    if len(names) <= most:
        return "{" + ", ".join(names) + "}"
    return "{" + f"{names[0]} and {len(names) - 1} others" + "}"
