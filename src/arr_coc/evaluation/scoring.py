"""What counts as right: how well an answer agrees with the true ones, from 0 to 1.

| metric   | is                                                                                                   |
|----------|------------------------------------------------------------------------------------------------------|
| `exact`  | equal to one of the answers, character by character                                                  |
| `anls`   | of DocVQA (arXiv:2007.00398) and ST-VQA (arXiv:1905.13648): 1 less the edit distance as a share of   |
|          | the longer text, nothing below one half, the best over the answers                                   |
| `vqa`    | of VQAv2 (arXiv:1612.00837): as three of ten people said, after normalisation                        |
| `yes-no` | of POPE (arXiv:2305.10355): the first yes or no of the answer                                        |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

Metric = Callable[[str, Sequence[str]], float]

ANLS_THRESHOLD = 0.5
AGREEING = 3  # people who must agree for a whole point

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {"none": "0"} | {word: str(number) for number, word in enumerate(_NUMBERS)}
_ARTICLES = ("a", "an", "the")
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
# VQAv2's list; words that are others without their apostrophe ("we'll", "it's") are not in it.
_CONTRACTIONS = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
    o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd somebody'd've somebody'll
    somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd
    there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll
    what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't
    would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""


def _with_apostrophes() -> dict[str, str]:
    """Contractions by how they are misspelled: with one of their apostrophes left out."""
    return {
        word[:place] + word[place + 1 :]: word
        for word in _CONTRACTIONS.split()
        for place, letter in enumerate(word)
        if letter == "'"
    }


_APOSTROPHES = _with_apostrophes()


def exact(answer: str, answers: Sequence[str]) -> float:
    """1 if an answer equals one of the true ones, else 0.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import exact
    >>> exact("red", ["red", "crimson"]), exact("Red", ["red"])
    (1.0, 0.0)

    ```
    """
    return float(any(answer == one for one in answers))


def edit_distance(first: str, second: str) -> int:
    """Levenshtein's distance: insertions, deletions and replacements of characters that make one text the other.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import edit_distance
    >>> edit_distance("kitten", "sitting")
    3

    ```
    """
    row = list(range(len(second) + 1))
    for up, here in enumerate(first, 1):
        corner, row[0] = row[0], up
        for left, there in enumerate(second, 1):
            corner, row[left] = row[left], min(row[left] + 1, row[left - 1] + 1, corner + (here != there))
    return row[-1]


def anls(answer: str, answers: Sequence[str]) -> float:
    """Similarity in characters with the nearest true answer, without regard to case and spacing; 0 below one half.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import anls
    >>> anls("12 Mai", ["12 may"]), anls("tomorrow", ["12 may"])
    (0.8333333333333334, 0.0)

    ```
    """
    said = _plain(answer)
    best = max((_similarity(said, _plain(one)) for one in answers), default=0.0)
    return best if best >= ANLS_THRESHOLD else 0.0


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _similarity(first: str, second: str) -> float:
    longer = max(len(first), len(second))
    return 1 - edit_distance(first, second) / longer if longer else 1.0


def normalise(text: str) -> str:
    """A text as VQAv2 compares it: lower case, digits for number words, no articles and little punctuation.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import normalise
    >>> normalise("The two dogs, they arent there!")
    "2 dogs they aren't there"

    ```
    """
    text = text.strip()
    joined = re.search(r"\d,\d", text) is not None  # 1,000 is one number
    shorter = text
    for mark in _PUNCTUATION:
        apart = f"{mark} " in text or f" {mark}" in text
        shorter = shorter.replace(mark, "" if apart or joined else " ")
    shorter = re.sub(r"\.(?!\d)", "", shorter)
    words = (_DIGITS.get(word, word) for word in shorter.lower().split())
    return " ".join(_APOSTROPHES.get(word, word) for word in words if word not in _ARTICLES)


def vqa(answer: str, answers: Sequence[str]) -> float:
    """How well an answer agrees with what several people said: whole points from three of them on.

    The mean over all ways to leave one of the people out. Both sides are always normalised; the published script does
    so only where people disagree. Where fewer than three others are left, all of them have to agree, and a single
    answer has to be met.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import vqa
    >>> vqa("Two.", ["2"] * 10), round(vqa("two", ["2"] * 2 + ["3"] * 8), 3)
    (1.0, 0.6)

    ```
    """
    said = normalise(answer)
    agrees = [normalise(one) == said for one in answers]
    if len(agrees) < 2:
        return float(any(agrees))
    needed = min(AGREEING, len(agrees) - 1)
    return sum(min(1.0, (sum(agrees) - one) / needed) for one in agrees) / len(agrees)


def read_yes_no(text: str) -> str | None:
    """`"yes"` or `"no"`, whichever a text says first ("not" is a no), or None.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import read_yes_no
    >>> read_yes_no("No."), read_yes_no("Yes, not far away"), read_yes_no("I know nothing")
    ('no', 'yes', None)

    ```
    """
    found = re.search(r"\b(yes|no|not)\b", text.lower())
    return None if found is None else "yes" if found[0] == "yes" else "no"


def yes_no(answer: str, answers: Sequence[str]) -> float:
    """1 if the first yes or no of an answer is the true one, else 0; an answer without one is wrong.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import yes_no
    >>> yes_no("No, there is none.", ["no"])
    1.0

    ```
    """
    said = read_yes_no(answer)
    return float(said is not None and any(said == read_yes_no(one) for one in answers))


class YesNoSummary(NamedTuple):
    """What POPE reports of a list of answers; "yes" is what is to be found.

    Args:
        accuracy (`float`): share of the answers that are right.
        precision, recall, f1 (`float`): of the answers that say yes; 0 where none does, or none should.
        yes_share (`float`): share of the answers that say yes.
        unclear_share (`float`): share of the answers that say neither; they are wrong, and not a yes.
    """

    accuracy: float
    precision: float
    recall: float
    f1: float
    yes_share: float
    unclear_share: float


def summarise_yes_no(answers: Sequence[str], labels: Sequence[str]) -> YesNoSummary:
    """Accuracy, precision, recall, F1 and the share of yes over a list of answers.

    Args:
        answers (`Sequence[str]`): as a model gave them.
        labels (`Sequence[str]`): `yes` or `no` for each.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import summarise_yes_no
    >>> found = summarise_yes_no(["Yes.", "yes", "no", "a dog"], ["yes", "no", "yes", "no"])
    >>> found.precision, found.recall, found.f1, found.yes_share
    (0.5, 0.5, 0.5, 0.5)

    ```
    """
    if len(answers) != len(labels) or not labels:
        raise ValueError(f"there are {len(answers)} answers and {len(labels)} labels; needed are as many, at least one")
    said = [read_yes_no(answer) for answer in answers]
    true = [read_yes_no(label) for label in labels]
    if None in true:
        raise ValueError(f"a label is yes or no, got {labels[true.index(None)]!r}")
    hits = sum(one == other == "yes" for one, other in zip(said, true, strict=True))
    right = sum(one == other for one, other in zip(said, true, strict=True))
    said_yes, true_yes, total = said.count("yes"), true.count("yes"), len(true)
    return YesNoSummary(
        accuracy=right / total,
        precision=hits / max(1, said_yes),
        recall=hits / max(1, true_yes),
        f1=2 * hits / max(1, said_yes + true_yes),
        yes_share=said_yes / total,
        unclear_share=said.count(None) / total,
    )


METRICS: Mapping[str, Metric] = MappingProxyType({"exact": exact, "anls": anls, "vqa": vqa, "yes-no": yes_no})
