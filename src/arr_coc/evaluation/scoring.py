"""Metrics: how well an answer agrees with the true answers, from 0 to 1.

| metric   | is                                                                                                   |
|----------|------------------------------------------------------------------------------------------------------|
| `exact`  | equal to one of the answers, character by character                                                  |
| `anls`   | of DocVQA (arXiv:2007.00398) and ST-VQA (arXiv:1905.13648): 1 minus the edit distance over the       |
|          | length of the longer text, 0 below one half; the best over the answers                               |
| `vqa`    | of VQAv2 (arXiv:1612.00837): matches / 3, at most 1, over nine of ten people, normalised             |
| `yes-no` | of POPE (arXiv:2305.10355): the first yes or no of the answer                                        |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

Metric = Callable[[str, Sequence[str]], float]

ANLS_THRESHOLD = 0.5
AGREEING = 3  # people who must agree for the full score

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {"none": "0"} | {word: str(number) for number, word in enumerate(_NUMBERS)}
_ARTICLES = ("a", "an", "the")
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
# VQAv2's list; it leaves out words that become another word without their apostrophe ("we'll", "it's").
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
    """Contractions by their misspellings, which lack one apostrophe."""
    return {
        word[:index] + word[index + 1 :]: word
        for word in _CONTRACTIONS.split()
        for index, letter in enumerate(word)
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
    return float(any(answer == expected for expected in answers))


def anls(answer: str, answers: Sequence[str]) -> float:
    """Character similarity to the nearest true answer, ignoring case and spacing; 0 below one half.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import anls
    >>> anls("12 Mai", ["12 may"]), anls("tomorrow", ["12 may"])
    (0.8333333333333334, 0.0)

    ```
    """
    from rapidfuzz.distance import Levenshtein  # of the extra `eval`; the demo page needs the other metrics only

    given = _plain(answer)
    similarities = (
        Levenshtein.normalized_similarity(given, _plain(expected), score_cutoff=ANLS_THRESHOLD) for expected in answers
    )
    return max(similarities, default=0.0)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def normalise(text: str) -> str:
    """Normalise a text as VQAv2 does: lower case, digits for number words, no articles and little punctuation.

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
    """Agreement with the answers of several people: matches / 3, at most 1.

    It is the mean over all ways to leave one person out. Both sides are always normalised; the published script does
    so only where people disagree. With fewer than three others, all of them must match; so must a single answer.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import vqa
    >>> vqa("Two.", ["2"] * 10), round(vqa("two", ["2"] * 2 + ["3"] * 8), 3)
    (1.0, 0.6)

    ```
    """
    given = normalise(answer)
    matches = [normalise(expected) == given for expected in answers]
    if len(matches) < 2:
        return float(any(matches))
    needed = min(AGREEING, len(matches) - 1)
    return sum(min(1.0, (sum(matches) - match) / needed) for match in matches) / len(matches)


def read_yes_no(text: str) -> str | None:
    """`"yes"` or `"no"`, whichever a text says first ("not" is a no), or None.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import read_yes_no
    >>> read_yes_no("No."), read_yes_no("Yes, not far away"), read_yes_no("I know nothing")
    ('no', 'yes', None)

    ```
    """
    match = re.search(r"\b(yes|no|not)\b", text.lower())
    return None if match is None else "yes" if match[0] == "yes" else "no"


def yes_no(answer: str, answers: Sequence[str]) -> float:
    """1 if the first yes or no of an answer is the true one, else 0; an answer without one is wrong.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import yes_no
    >>> yes_no("No, there is none.", ["no"])
    1.0

    ```
    """
    given = read_yes_no(answer)
    return float(given is not None and any(given == read_yes_no(expected) for expected in answers))


class YesNoSummary(NamedTuple):
    """POPE's figures for a list of answers; "yes" is the positive class.

    Args:
        accuracy (`float`): share of the answers that are right.
        precision, recall, f1 (`float`): of "yes"; 0 if no answer or no label is yes.
        yes_share (`float`): share of the answers that say yes.
        unclear_share (`float`): share of the answers that say neither; they count as wrong, and not as yes.
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
        answers (`Sequence[str]`): answers of a model.
        labels (`Sequence[str]`): `yes` or `no` for each.

    Example:

    ```python
    >>> from arr_coc.evaluation.scoring import summarise_yes_no
    >>> summary = summarise_yes_no(["Yes.", "yes", "no", "a dog"], ["yes", "no", "yes", "no"])
    >>> summary.precision, summary.recall, summary.f1, summary.yes_share
    (0.5, 0.5, 0.5, 0.5)

    ```
    """
    if len(answers) != len(labels) or not labels:
        raise ValueError(
            f"give one label per answer, at least one; got {len(answers)} answers and {len(labels)} labels"
        )
    given = [read_yes_no(answer) for answer in answers]
    true = [read_yes_no(label) for label in labels]
    if None in true:
        raise ValueError(f"labels must be yes or no, got {labels[true.index(None)]!r}")
    hits = sum(answer == label == "yes" for answer, label in zip(given, true, strict=True))
    right = sum(answer == label for answer, label in zip(given, true, strict=True))
    given_yes, true_yes, total = given.count("yes"), true.count("yes"), len(true)
    return YesNoSummary(
        accuracy=right / total,
        precision=hits / max(1, given_yes),
        recall=hits / max(1, true_yes),
        f1=2 * hits / max(1, given_yes + true_yes),
        yes_share=given_yes / total,
        unclear_share=given.count(None) / total,
    )


METRICS: Mapping[str, Metric] = MappingProxyType({"exact": exact, "anls": anls, "vqa": vqa, "yes-no": yes_no})
