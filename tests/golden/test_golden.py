"""The golden record holds, and `differences` would notice if it did not."""

import copy
import json

import pytest
import record

RECORD = json.loads(record.RECORD.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("part", record.PARTS)
def test_the_record_holds(part):
    now = json.loads(json.dumps(record.make(part)))
    assert record.differences({part: RECORD[part]}, {part: now}) == []


def test_the_record_has_these_parts():
    assert RECORD.keys() == record.PARTS.keys()


def move_a_cell(question):
    cells = question["kept"][0][2]
    question["kept"][0][2] = f"{int(cells, 16) ^ 1:0{len(cells)}x}"


def answer_otherwise(question):
    question["answer"] += "s"


def raise_relevance(by):
    def change(question):
        question["relevance"][7] += by

    return change


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (move_a_cell, ["kept/0/2"]),
        (answer_otherwise, ["answer"]),
        (raise_relevance(2e-5), ["relevance/7"]),
        (raise_relevance(-2e-5), ["relevance/7"]),
        (raise_relevance(5e-6), []),
        (lambda question: question.pop("reason"), ["reason"]),
        (lambda question: question["relevance"].pop(), ["relevance"]),
    ],
)
def test_differences_are_found_where_they_are(change, place):
    name = "astronaut.jpg prune 0.25"
    now = copy.deepcopy(RECORD)
    change(now["embedded"][name])
    found = [line.split(": ")[0] for line in record.differences(RECORD, now)]
    assert found == [f"/embedded/{name}/{part}" for part in place]


@pytest.mark.parametrize(
    ("family", "by", "noticed"),
    [("qwen3_vl", 5e-4, True), ("qwen3_5", 5e-4, False), ("qwen3_5_moe", 5e-4, False), ("qwen3_5_moe", 3e-3, True)],
)
@pytest.mark.parametrize("part", ["logits", "relevance"])
def test_logits_of_recurrent_layers_may_differ_more(family, by, noticed, part):
    name = f"{family} arr-coc-untrained rows"
    now = copy.deepcopy(RECORD)
    numbers = now["tiny"][name][part]
    numbers = numbers if part == "logits" else numbers[0]
    numbers[0] += by
    found = record.differences(RECORD, now)
    assert bool(found) == (noticed or part == "relevance")
