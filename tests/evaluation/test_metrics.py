"""Measures of looking, on cases that can be counted by hand."""

import pytest
import torch

from arr_coc.data.boxes import cells_inside
from arr_coc.data.example import Example
from arr_coc.evaluation.metrics import answer_coverage, coverage, overlap, pointing, precision


def test_cells_belong_to_a_box_that_covers_a_quarter_of_them():
    found = cells_inside([(0.0, 0.0, 0.3, 0.5)], 2, 4)  # 1.2 cells wide: the second column is covered to a fifth
    assert found.int().tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert cells_inside([(0.0, 0.0, 0.35, 0.5)], 2, 4).int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("box", [(0.51, 0.51, 0.52, 0.52), (0.49, 0.49, 0.51, 0.51), (0.5, 0.5, 0.5, 0.5), (1,) * 4])
def test_every_box_has_a_cell_however_small(box):
    assert cells_inside([box], 4, 4).sum() == 1


def test_no_box_no_cell_and_boxes_join():
    assert not cells_inside([], 3, 3).any()
    both = cells_inside([(0, 0, 0.5, 0.5), (0.5, 0.5, 1, 1)], 2, 2)
    assert both.int().tolist() == [[1, 0], [0, 1]]


def test_precision_and_coverage_count_what_was_kept():
    kept = torch.tensor([[True, True, False, False]])
    inside = torch.tensor([[True, False, True, True]])
    assert precision(kept, inside).item() == pytest.approx(1 / 2)
    assert coverage(kept, inside).item() == pytest.approx(1 / 3)


def asked(*boxes, **facts):
    return Example("what?", list, boxes=boxes, **facts)


def test_an_answer_is_seen_in_its_own_box_not_in_its_label():
    label, value = (0.0, 0.0, 0.75, 1.0), (0.75, 0.0, 1.0, 1.0)
    kept = torch.tensor([[True, True, True, False]])
    assert answer_coverage(kept, asked(label, value, clues=1)) == 0
    assert coverage(kept.flatten(), cells_inside([label, value], 1, 4).flatten()) == 0.75  # most of both together
    assert answer_coverage(~kept, asked(label, value, clues=1)) == 1
    assert answer_coverage(kept, asked(value, label, clues=1)) == 1


def test_all_own_boxes_are_needed_unless_any_is_enough():
    first, second = (0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)
    kept = torch.tensor([[True, True, True, False]])
    assert answer_coverage(kept, asked(first, second)) == 0.5
    assert answer_coverage(kept, asked(first, second, any_box=True)) == 1
    with pytest.raises(ValueError, match="no box of its answer's own"):
        answer_coverage(kept, asked(first, clues=1))


def test_a_cell_of_a_clip_is_seen_in_any_frame():
    kept = torch.tensor([[[True, False]], [[False, False]]])  # [t, h, w]
    assert answer_coverage(kept, asked((0.0, 0.0, 0.5, 1.0))) == 1
    assert answer_coverage(kept, asked((0.5, 0.0, 1.0, 1.0))) == 0


def test_overlap_asks_for_as_many_cells_as_there_are():
    inside = torch.tensor([[True, True, False, False], [False, False, False, True]])
    relevance = torch.tensor([[0.9, 0.1, 0.8, 0.0], [0.1, 0.2, 0.3, 0.9]])
    assert overlap(relevance, inside).tolist() == pytest.approx([1 / 3, 1.0])
    assert overlap(-relevance, inside)[1] == 0
    assert pointing(relevance, inside).tolist() == [True, True]
    assert pointing(-relevance, inside).tolist() == [False, False]


def test_random_relevance_has_the_overlap_of_chance():
    torch.manual_seed(0)
    inside = torch.zeros(4000, 64, dtype=torch.bool)
    inside[:, :16] = True
    # a quarter of a quarter is hit: 4 of 28 in the union
    assert overlap(torch.rand(4000, 64), inside).mean().item() == pytest.approx(4 / 28, abs=0.01)
