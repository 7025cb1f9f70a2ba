"""Finds the keypoints that are each other's mirror image, by their names.

A mirrored left eye is a right eye. A pair that is not found trains on the wrong side without any
error, so names are read as people write them: left_eye, Left Eye, lefteye, l_eye, eye_L, LEye, L,
and lhip beside rhip.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

OPPOSITE = {"left": "right", "right": "left", "l": "r", "r": "l"}
# A name falls into words at anything but letters, and where small letters end: LEye is L and Eye.
WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
# So many names of a single letter are an alphabet, in which L and R are no sides.
ALPHABET = 5

Span: TypeAlias = tuple[int, int]  # where in a name: first character, behind the last


def partners(names: Sequence[str]) -> list[int]:
    """Return the index of each keypoint's partner: left_eye has right_eye's, the nose has its own."""
    found = [_partner(name, names) for name in names]
    out = []
    for index, partner in enumerate(found):
        # A pair is one only if each is the other's partner.
        mutual = partner is not None and found[partner] == index
        out.append(partner if partner is not None and mutual else index)
    return out


def unpaired(names: Sequence[str]) -> list[str]:
    """Return the names that state a side, but have no partner."""
    alone = []
    for index, partner in enumerate(partners(names)):
        if partner == index and _sides(names[index], names):
            alone.append(names[index])
    return alone


def contradicted(names: Sequence[str], flip: Sequence[int]) -> tuple[str, str] | None:
    """Return the first name that states a side, and that of its partner by name, where `flip` gives
    it another one; None where there is no such name."""
    for index, partner in enumerate(partners(names)):
        if partner not in (index, flip[index]) and _sides(names[index], names):
            return names[index], names[partner]
    return None


def opposite(name: str) -> str:
    """Return the name of the other side, spelled alike: Right for Left."""
    return _exchanged(name, _stated(name))


def said(names: Sequence[str], flip: Sequence[int]) -> str:
    """Say which keypoints change places in a mirrored image, and which do not."""
    pairs = []
    own = []
    for index, partner in enumerate(flip):
        if partner == index:
            own.append(names[index])
        elif index < partner:
            pairs.append(f"{names[index]} and {names[partner]}")
    if not pairs:
        return (
            f"mirrored images swap no keypoints: no pair of sides in {', '.join(own)}"
        )
    kept = f"; no side: {', '.join(own)}" if own else ""
    return f"mirrored images swap {', '.join(pairs)}{kept}"


def _partner(name: str, names: Sequence[str]) -> int | None:
    """Return the index of the first candidate that is there, in any case of letters."""
    folded = [other.casefold() for other in names]
    for candidate in _candidates(name, names):
        if candidate in names:
            return names.index(candidate)
        if folded.count(candidate.casefold()) == 1:
            return folded.index(candidate.casefold())
    return None


def _candidates(name: str, names: Sequence[str]) -> Iterator[str]:
    """Yield what the partner may be called, the likeliest first."""
    # 1. Every side that is named is exchanged: the left eye's right corner is mirrored to the
    #    right eye's left one.
    spans = _sides(name, names)
    if spans:
        yield _exchanged(name, spans)
        for span in spans:
            yield _exchanged(name, [span])
        return
    # 2. A guess counts only if the partner is there: left or right anywhere, as in lowerleft, ...
    for side in ("left", "right"):
        places = [match.span() for match in re.finditer(side, name, re.IGNORECASE)]
        if places:
            yield _exchanged(name, places)
    # 3. ... or a letter at the beginning or the end of a word, as in lhip.
    if _is_alphabet(names):
        return
    for word in WORDS.finditer(name):
        for place in (word.start(), word.end() - 1):
            if name[place].casefold() in ("l", "r"):
                yield _exchanged(name, [(place, place + 1)])


def _sides(name: str, names: Sequence[str]) -> list[Span]:
    """Find where a name states a side."""
    if len(name) == 1 and _is_alphabet(names):
        return []
    return _stated(name)


def _stated(name: str) -> list[Span]:
    spans = []
    for word in WORDS.finditer(name):
        text = word.group().casefold()
        start = word.start()
        if text.startswith(("left", "right")):
            length = len("left") if text.startswith("left") else len("right")
            spans.append((start, start + length))
        elif text in ("l", "r"):
            # L4 beside a digit is a vertebra rather than a side.
            around = name[max(start - 1, 0) : start + 2]
            if not any(character.isdigit() for character in around):
                spans.append((start, start + 1))
    return spans


def _is_alphabet(names: Sequence[str]) -> bool:
    return sum(len(name) == 1 for name in names) >= ALPHABET


def _exchanged(name: str, spans: Sequence[Span]) -> str:
    """Put the other side at each of these places, in the case of what stands there."""
    out = name
    for start, end in reversed(spans):
        word = name[start:end]
        other = OPPOSITE[word.casefold()]
        if word.isupper():
            other = other.upper()
        elif word[0].isupper():
            other = other.capitalize()
        out = out[:start] + other + out[end:]
    return out
