"""What counts as right, worked by hand, and how sure a difference is."""

import numpy as np
import pytest

from arr_coc.evaluation.report import statistics
from arr_coc.evaluation.report.statistics import budget_at, mean_intervals, paired_differences
from arr_coc.evaluation.scoring import (
    METRICS,
    anls,
    exact,
    normalise,
    read_yes_no,
    summarise_yes_no,
    vqa,
    yes_no,
)


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_gives_one_to_the_truth_and_nothing_to_silence_or_without_truth(name):
    score = METRICS[name]
    assert score("yes", ["yes"]) == 1
    assert score("", ["yes"]) == 0
    assert score("no", ["yes"]) == 0
    assert score("yes", []) == 0


def test_exact_is_strict_and_takes_any_of_the_answers():
    assert exact("blue", ["red", "blue"]) == 1
    assert exact("Blue", ["blue"]) == exact("blue ", ["blue"]) == exact("lu", ["blue"]) == 0
    assert exact("café", ["café"]) == 1


@pytest.mark.parametrize(
    ("answer", "answers", "score"),
    [
        ("  New   York\n", ["new york"], 1.0),
        ("new yorc", ["new york"], 7 / 8),
        ("abxy", ["abcd"], 0.5),  # the threshold itself counts
        ("axyz", ["abcd"], 0.0),  # a quarter is below it
        ("abxyz", ["abcde", "abcyz"], 4 / 5),  # the best of several
        ("", [""], 1.0),
        ("", ["abc"], 0.0),
        ("kitten", ["sitting"], 4 / 7),  # two replacements and an insertion
        ("abcd", ["bacd"], 0.5),  # two letters that changed places count twice
        ("größe", ["grosse"], 0.5),
        ("ΑΘΉΝΑ", ["αθήνα"], 1.0),
        ("東京都", ["東京"], 2 / 3),
    ],
)
def test_anls_worked_by_hand(answer, answers, score):
    assert anls(answer, answers) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two", "2"),
        ("none", "0"),
        ("The a an", ""),
        ("a dog.", "dog"),
        ("1,000", "1000"),
        ("3.5", "3.5"),
        ("red,blue", "red blue"),
        ("red, blue", "red blue"),
        ("t-shirt", "t shirt"),
        ("dont", "don't"),
        ("couldnt've", "couldn't've"),
        ("well", "well"),  # not "we'll"
        ("yes!\n", "yes"),
        ("Crème brûlée", "crème brûlée"),
        ("", ""),
    ],
)
def test_normalisation_worked_by_hand(text, expected):
    assert normalise(text) == expected
    assert normalise(expected) == expected


@pytest.mark.parametrize(("right", "score"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_vqa_over_ten_answers(right, score):
    # of ten subsets of nine, `right` have one match less: (right * (right - 1) + (10 - right) * right) / 30, up to 3
    assert vqa("two", ["2"] * right + ["cat"] * (10 - right)) == pytest.approx(score)


def test_vqa_over_fewer_answers_asks_for_as_many_as_there_are():
    assert vqa("Two.", ["2"]) == 1
    assert vqa("2", ["2", "two"]) == 1
    assert vqa("2", ["2", "3"]) == 0.5
    assert vqa("2", ["2", "2", "3"]) == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert vqa("2", ["2", "3", "3", "3"]) == pytest.approx((0 + 3 / 3) / 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no.", "no"),
        ("No", "no"),
        ("NO!", "no"),
        ("Yes, there is no doubt", "yes"),
        ("There is not a dog.", "no"),
        ("nothing, yesterday", None),
        ("", None),
        ("ünknown", None),
    ],
)
def test_the_first_yes_or_no_counts(text, said):
    assert read_yes_no(text) == said
    assert yes_no(text, ["yes"]) == (said == "yes")
    assert yes_no(text, ["No"]) == (said == "no")


def test_a_summary_of_yes_and_no_worked_by_hand():
    answers = ["Yes.", "yes", "Yes, it is", "no", "No", "maybe", "no", "yes"]
    labels = ["yes", "yes", "no", "no", "no", "yes", "yes", "yes"]
    found = summarise_yes_no(answers, labels)
    # three of four said yes rightly; five should have; two no are right
    assert found == pytest.approx((5 / 8, 3 / 4, 3 / 5, 2 * 3 / 9, 4 / 8, 1 / 8))


def test_a_summary_where_nobody_says_yes_has_no_precision_and_does_not_fail():
    assert summarise_yes_no(["no", ""], ["yes", "no"]) == (0.0, 0.0, 0.0, 0.0, 0.0, 0.5)


@pytest.mark.parametrize(("answers", "labels"), [(["yes"], []), ([], []), (["yes"], ["maybe"])])
def test_a_summary_refuses_what_does_not_fit(answers, labels):
    with pytest.raises(ValueError, match="label"):
        summarise_yes_no(answers, labels)


def paired_difference(ours, theirs, **options):
    [interval] = paired_differences([ours], [theirs], **options)
    return interval


def mean_interval(*tasks, **options):
    [interval] = mean_intervals(tasks, **options)
    return interval


def test_the_difference_of_equal_scores_is_nothing_and_a_shifted_one_is_not():
    rng = np.random.default_rng(1)
    scores = rng.random(200)
    noise = rng.normal(0, 0.1, 200)
    equal = paired_difference(scores, scores)
    assert equal == (0, 0, 0)
    noisy = paired_difference(scores + noise - noise.mean(), scores)
    assert noisy.low < 0 < noisy.high
    shifted = paired_difference(scores + noise + 0.05, scores)
    assert 0 < shifted.low < shifted.mean < shifted.high


def test_pairs_are_kept_together():
    rng = np.random.default_rng(2)
    scores = rng.random(200)
    better = scores + 0.01 + 0.001 * rng.random(200)
    paired, broken = paired_difference(better, scores), paired_difference(better, rng.permutation(scores))
    assert paired.low > 0
    assert broken.low < 0 < broken.high


def test_an_interval_is_as_wide_as_theory_says():
    scores = np.repeat([0.0, 1.0], [600, 400])
    found = mean_interval(scores, resamples=4000)
    half = 1.96 * np.sqrt(0.4 * 0.6 / 1000)
    assert found.mean == pytest.approx(0.4)
    assert found.low == pytest.approx(0.4 - half, abs=0.004)
    assert found.high == pytest.approx(0.4 + half, abs=0.004)


def test_intervals_are_the_same_for_the_same_seed_and_not_for_another():
    scores = np.random.default_rng(3).random(50)
    assert mean_interval(scores, seed=5) == mean_interval(scores, seed=5)
    assert mean_interval(scores, seed=5) != mean_interval(scores, seed=6)


def test_memory_is_bounded_and_does_not_change_what_is_found(monkeypatch):
    scores = np.random.default_rng(4).random((3, 300))
    whole, drawn, count = mean_intervals([scores]), [], statistics._count

    def counted(items, number):
        drawn.append(items.size)
        return count(items, number)

    monkeypatch.setattr(statistics, "_count", counted)
    monkeypatch.setattr(statistics, "_MOST_DRAWS", 1000)
    parts = mean_intervals([scores])
    assert max(drawn) <= 1000
    assert sum(drawn) == 2000 * 300  # once for all rows
    assert parts == whole


def test_intervals_are_the_quantiles_of_means_of_samples_drawn_one_by_one():
    rng = np.random.default_rng(7)
    tasks = [rng.random((4, 40)), rng.random((4, 7))]
    draws = np.random.default_rng(11)
    drawn = [draws.integers(values.shape[1], size=(500, values.shape[1])) for values in tasks]
    for row, found in enumerate(mean_intervals(tasks, resamples=500, seed=11)):
        means = [
            np.mean([values[row, items[sample]].mean() for values, items in zip(tasks, drawn, strict=True)])
            for sample in range(500)
        ]
        assert found[1:] == pytest.approx(np.quantile(means, [0.025, 0.975]))
        assert found.mean == pytest.approx((tasks[0][row].mean() + tasks[1][row].mean()) / 2)
        assert found == pytest.approx(mean_interval(tasks[0][row], tasks[1][row], resamples=500, seed=11))


def test_tasks_count_alike_however_large_they_are():
    found = mean_interval(np.ones(1000), np.zeros(10))
    assert found == (0.5, 0.5, 0.5)
    # the smaller task decides how wide the interval is
    wide = mean_interval(np.ones(1000), np.repeat([0.0, 1.0], 5))
    assert wide.mean == 0.75
    assert wide.low == pytest.approx(0.5 + 0.2 / 2, abs=0.06)
    [difference] = paired_differences([np.ones(9), np.ones(2)], [np.zeros(9), np.ones(2)])
    assert difference == (0.5, 0.5, 0.5)


def test_one_item_has_no_width():
    assert mean_interval([0.3]) == pytest.approx((0.3, 0.3, 0.3))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: mean_interval([]), "at least one number"),
        (lambda: mean_interval([[[1.0]]]), "at least one number"),
        (lambda: mean_interval([0.5, float("nan")]), "finite"),
        (lambda: mean_interval([0.5], resamples=0), "`resamples`"),
        (lambda: mean_intervals([]), "`tasks` is empty"),
        (lambda: mean_intervals([[[1.0]], [[1.0], [0.0]]]), "same rows"),
        (lambda: paired_difference([1.0], [1.0, 0.0]), "same items"),
        (lambda: paired_differences([[1.0]], []), "same tasks"),
        (lambda: budget_at([], 0.5), "at least one point"),
        (lambda: budget_at([(4, 0.5), (4, 0.6)], 0.5), "measured once"),
        (lambda: budget_at([(4, float("nan"))], 0.5), "finite"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()


CURVE = [(256, 0.8), (64, 0.5), (128, 0.7)]


@pytest.mark.parametrize(
    ("level", "budget"),
    [
        (0.81, None),  # never reached
        (0.8, 256),
        (0.75, 192),
        (0.7, 128),
        (0.6, 96),
        (0.5, 64),
        (0.1, 64),  # nothing is guessed below the smallest
    ],
)
def test_budgets_are_read_off_a_curve(level, budget):
    assert budget_at(CURVE, level) == (None if budget is None else pytest.approx(budget))


def test_a_curve_that_rises_again_further_down_does_not_count():
    assert budget_at([(10, 0.9), (20, 0.4), (30, 0.8)], 0.6) == pytest.approx(25)
    assert budget_at([(10, 0.9), (20, 0.8), (30, 0.4)], 0.6) is None
