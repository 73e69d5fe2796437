"""The methods of papers: each against a case worked by hand or by brute force, then on tiny models."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drawing import random_tokens
from simple_selector import PEERS, TOLERANCE
from tiny_models import EOS, IMAGE, QWEN, SMALL, TWO_IMAGES, inputs_for, tiny_model

from arr_coc import Selection, VisualQuery, create_selector, prepare, register_selector
from arr_coc.evaluation.contenders import open_contenders
from arr_coc.evaluation.run import Opened, measure_looking, run_contender
from arr_coc.evaluation.tasks import open_task
from arr_coc.families.family import open_family
from arr_coc.inference.load import load_model, load_processor
from arr_coc.selectors import linear
from arr_coc.selectors.contract import InvalidSelectorError
from arr_coc.selectors.papers import covering
from arr_coc.selectors.papers.covering import cover
from arr_coc.selectors.per_picture import PerPictureSelector, strongest
from arr_coc.selectors.registry import _REGISTRY

MERGING = ["prumerge", "tome", "visionzip"]


def query(tokens, grid=None, words=None, attention=None, keys=None, deepstack=()):
    tokens = torch.as_tensor(tokens, dtype=torch.float32)
    read = attention if callable(attention) else lambda layer: torch.as_tensor(attention)
    return VisualQuery(
        tokens, grid or (1, 1, len(tokens)), torch.ones(1, tokens.shape[1]) if words is None else words,
        attention_reader=read, key_reader=lambda layer: torch.as_tensor(keys), deepstack=deepstack,
    )  # fmt: skip


def cloud(count=30, width=6, seed=0):
    """Tokens in four heaps, as pictures have them."""
    centres = random_tokens(4, width, seed + 100)[0]
    return random_tokens(count, width, seed)[0] + centres[torch.arange(count) % 4]


def unit(rows):
    rows = np.asarray(rows, dtype=np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def kept(name, one, budget, **kwargs):
    return create_selector(name, **kwargs).select([one], budget)[0].indices.tolist()


def test_these_are_the_peers():
    assert set(PEERS) >= {"cdpruner", "divprune", "hiprune", "mmtok", "scope", *MERGING}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 9, 29])
def test_divprune_adds_the_token_farthest_from_all_that_were_kept(seed, count):
    tokens = cloud(seed=seed)
    distance = 1 - unit(tokens) @ unit(tokens).T
    chosen = [int(np.argmax([np.delete(distance[i], i).min() for i in range(30)]))]
    while len(chosen) < count:
        left = [i for i in range(30) if i not in chosen]
        chosen.append(max(left, key=lambda i: min(distance[i, s] for s in chosen)))
    assert kept("divprune", query(tokens), count) == sorted(chosen)


def test_divprune_keeps_a_number_even_of_tokens_that_are_all_alike():
    assert kept("divprune", query(torch.ones(6, 4)), 3) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sign", [1, -1])
def test_cdpruner_adds_the_token_of_the_largest_determinant(seed, sign):
    tokens, words = cloud(20, 12, seed), random_tokens(4, 12, seed + 9)[0]
    cosine = sign * (unit(tokens) @ unit(words).T).mean(axis=1)
    relevance = (cosine - cosine.min()) / (cosine.max() - cosine.min())
    rows = torch.from_numpy(unit(tokens) * relevance[:, None])
    kernel = rows @ rows.T
    chosen = []
    while len(chosen) < 8:
        left = [i for i in range(20) if i not in chosen]
        chosen.append(max(left, key=lambda i: torch.linalg.det(kernel[[*chosen, i]][:, [*chosen, i]]).item()))
    one = query(tokens, words=words)
    assert kept("cdpruner", one, 8, sign=sign) == sorted(chosen)
    assert kept("cdpruner", one, 1, sign=sign) == [int(relevance.argmax())]
    assert kept("cdpruner", one, 8, sign=-sign) != sorted(chosen)


def test_cdpruner_goes_on_where_nothing_is_left_to_span():
    flat = query(random_tokens(12, 2, 1)[0])  # two dimensions hold no volume of nine tokens
    assert len(set(kept("cdpruner", flat, 9))) == 9
    same = query(torch.ones(6, 4))
    assert len(set(kept("cdpruner", same, 4))) == 4
    with pytest.raises(ValueError, match="`sign` must be 1 or -1, got 0"):
        create_selector("cdpruner", sign=0)


def covers(likeness, count, weights):
    """Coverage as it is defined, for every candidate at every step."""
    chosen = []
    while len(chosen) < count:
        left = [i for i in range(likeness.shape[1]) if i not in chosen]
        before = np.maximum(likeness[:, chosen].max(axis=1, initial=0), 0)
        gain = [weights[i] * (np.maximum(likeness[:, i], before) - before).sum() for i in left]
        chosen.append(left[int(np.argmax(gain))])
    return chosen


@pytest.mark.parametrize("seed", range(3))
def test_scope_covers_the_tokens_by_salient_ones(seed):
    tokens = cloud(seed=seed)
    attention = np.random.default_rng(seed).random(30)
    alike = unit(tokens) @ unit(tokens).T
    one = query(tokens, attention=attention)
    for alpha in (0.0, 1.0, 2.0):
        assert kept("scope", one, 9, alpha=alpha) == sorted(covers(alike, 9, attention**alpha))
    assert kept("scope", one, 9) == kept("scope", one, 9, alpha=1.0)
    assert kept("scope", one, 9, alpha=0.0) != kept("scope", one, 9, alpha=2.0)


@pytest.mark.parametrize("seed", range(3))
def test_mmtok_covers_words_and_tokens(seed):
    tokens, words = cloud(seed=seed), random_tokens(3, 6, seed + 9)[0]

    def softmax(x):
        powers = np.exp(x - x.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    of_words = softmax(unit(words) @ unit(tokens).T / 0.01) / 3
    of_tokens = softmax(unit(tokens) @ unit(tokens).T / 0.2) / 30
    expected = covers(np.concatenate([of_words, 0.5 * of_tokens]), 9, np.ones(30))
    one = query(tokens, words=words)
    assert kept("mmtok", one, 9) == sorted(expected)
    assert kept("mmtok", one, 9) != kept("mmtok", replace(one, words=-words), 9)


def test_coverage_is_the_same_counted_anew_or_where_it_changed(monkeypatch):
    likeness, weights = random_tokens(50, 40, 3)[0], torch.rand(40, generator=torch.Generator().manual_seed(1))
    changed = cover(likeness, 30, weights)
    monkeypatch.setattr(covering, "_count_changed", covering._count_all)
    assert torch.equal(cover(likeness, 30, weights), changed)
    assert sorted(cover(torch.eye(3), 3).tolist()) == [0, 1, 2]
    assert cover(torch.zeros(3, 3), 3).tolist() == [0, 1, 2]  # nobody gains, and still each comes once


def test_hiprune_takes_neighbours_within_the_borders():
    grid = (2, 3, 4)
    last = torch.linspace(0.1, 0.2, 24)  # later tokens receive more

    def reads(anchor):
        middle = torch.zeros(24)
        middle[anchor] = 1.0
        return query(torch.rand(24, 4), grid, attention=lambda layer: {0.5: middle, -1: last}[layer])

    # in the middle of a frame: four neighbours, then the last
    assert kept("hiprune", reads(5), 7) == [1, 4, 5, 6, 9, 22, 23]
    # at the right border: the next number lies in the next row, and is no neighbour
    assert kept("hiprune", reads(7), 7) == [3, 6, 7, 11, 21, 22, 23]
    # in the last row of the first frame: the next row lies in the next frame
    assert kept("hiprune", reads(11), 6) == [7, 10, 11, 21, 22, 23]
    # in the corner
    assert kept("hiprune", reads(0), 4) == [0, 1, 4, 23]
    assert kept("hiprune", reads(5), 1) == [5]


def test_hiprune_has_a_fifth_of_its_share_of_anchors():
    middle, last = torch.arange(100.0).flip(0), torch.arange(100.0)
    one = query(torch.rand(100, 4), (1, 10, 10), attention=lambda layer: {0.5: middle, -1: last}[layer])
    # 2 anchors of 40 * 0.25 / 5 are the first cells; with their neighbours 5 cells
    assert kept("hiprune", one, 40, alpha=0.25) == [0, 1, 2, 10, 11, *range(65, 100)]


def test_visionzip_averages_what_is_not_dominant_into_the_nearest_target():
    attention = [0.01, 0.30, 0.02, 0.03, 0.04, 0.20, 0.05, 0.06]
    # rest is 0 2 3 4 6 7, of which every third is a target: 0 and 4
    keys = torch.tensor([[1, 0], [0, 0], [5, 1], [1, 3], [0, 1], [0, 0], [-1, 1], [2, -1]]).float()
    tokens, level = random_tokens(8, 4, 0)[0], random_tokens(8, 4, 1)[0]
    one = query(tokens, attention=attention, keys=keys, deepstack=(level,))
    [selection] = create_selector("visionzip", contextual=0.5).select([one], 4)
    assert selection.indices.tolist() == [0, 1, 4, 5]
    for rows, merged in ((tokens, selection.features), (level, selection.deepstack[0])):
        expected = torch.stack([rows[[0, 2, 7]].mean(dim=0), rows[1], rows[[3, 4, 6]].mean(dim=0), rows[5]])
        torch.testing.assert_close(merged, expected)
        assert torch.equal(merged[[1, 3]], rows[[1, 5]])


def test_visionzip_keeps_targets_apart_that_are_just_alike():
    one = query(random_tokens(9, 4)[0], attention=torch.arange(9.0), keys=torch.ones(9, 3))
    [selection] = create_selector("visionzip", contextual=0.5).select([one], 4)
    assert selection.indices.tolist() == [0, 3, 7, 8]
    assert selection.features.isfinite().all()
    assert kept("visionzip", one, 1) == [8]
    assert create_selector("visionzip", contextual=0).select([one], 4)[0].features is None
    larger = query(random_tokens(90, 4)[0], attention=torch.arange(90.0), keys=random_tokens(90, 3)[0])
    # 36 dominant ones, then 4 of the other 54
    assert kept("visionzip", larger, 40) == [0, 13, 26, 39, *range(54, 90)]


def test_tome_merges_the_most_similar_pairs_first_and_weighs_by_size():
    tokens = torch.tensor([[2.0, 0.0, 1.0], [1.0, 0.1, 0.5], [4.0, 1.5, 2.0], [0.0, 3.0, 0.0]])
    level = random_tokens(4, 3, 1)[0]
    one = query(tokens, deepstack=(level,))

    def merged(count):
        [selection] = create_selector("tome", per_pass=0.5).select([one], count)
        return selection.indices.tolist(), selection.features, selection.deepstack[0]

    # 0 and 2 both are most like 1, and 0 is so more than 2
    for rows, place in ((tokens, 1), (level, 2)):
        three, two, last = merged(3), merged(2), merged(1)
        assert (three[0], two[0], last[0]) == ([1, 2, 3], [1, 3], [3])
        torch.testing.assert_close(three[place], torch.stack([rows[:2].mean(dim=0), rows[2], rows[3]]))
        torch.testing.assert_close(two[place], torch.stack([rows[:3].mean(dim=0), rows[3]]))
        # three tokens and one: not the mean of two means
        torch.testing.assert_close(last[place], rows.mean(dim=0)[None])
        assert not torch.allclose(last[place][0], (rows[:3].mean(dim=0) + rows[3]) / 2, atol=1e-2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("per_pass", [0.5, 0.1])
def test_tome_compares_what_pairs_have_become(per_pass, seed):
    tokens = cloud(25, 4, seed)
    rows, groups = tokens.double().numpy(), [[i] for i in range(25)]
    while len(groups) > 4:
        means = unit([rows[group].mean(axis=0) for group in groups])
        best = {a: max(range(1, len(groups), 2), key=lambda b: means[a] @ means[b]) for a in range(0, len(groups), 2)}
        pairs = sorted(best.items(), key=lambda pair: -means[pair[0]] @ means[pair[1]])
        pairs = pairs[: min(len(groups) - 4, max(1, int(per_pass * len(groups))))]
        for a, b in pairs:
            groups[b] = groups[b] + groups[a]  # its own token first
        groups = [group for i, group in enumerate(groups) if i not in {a for a, _ in pairs}]
    [selection] = create_selector("tome", per_pass=per_pass).select([query(tokens)], 4)
    assert selection.indices.tolist() == [group[0] for group in groups]
    expected = torch.stack([tokens[group].mean(dim=0) for group in groups])
    torch.testing.assert_close(selection.features, expected)


def test_prumerge_adds_neighbours_by_attention_and_one_token_for_the_rest():
    attention = torch.tensor([0.05, 0.40, 0.15, 0.30, 0.10])
    keys = torch.tensor([[1.0, 0.1], [1.0, 0.0], [-1.0, 0.0], [0.1, 1.0], [0.5, 1.0]])
    tokens, level = random_tokens(5, 4, 0)[0], random_tokens(5, 4, 1)[0]
    one = query(tokens, attention=7 * attention, keys=keys, deepstack=(level,))  # of any scale
    [selection] = create_selector("prumerge", neighbours=1).select([one], 3)
    assert selection.indices.tolist() == [1, 2, 3]
    for rows, merged in ((tokens, selection.features), (level, selection.deepstack[0])):
        rest = (0.05 * rows[0] + 0.15 * rows[2] + 0.10 * rows[4]) / 0.30
        expected = torch.stack([rows[1] + 0.05 * rows[0], rest, rows[3] + 0.10 * rows[4]])
        torch.testing.assert_close(merged, expected)
    [alone] = create_selector("prumerge", neighbours=2).select([one], 1)
    assert alone.indices.tolist() == [1]
    torch.testing.assert_close(alone.features[0], tokens[1] + 0.05 * tokens[0] + 0.10 * tokens[4])


def test_the_example_for_a_new_selector_is_a_whole_one():
    contributing = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", contributing, flags=re.DOTALL)
    names = {
        "register_selector": register_selector, "PerPictureSelector": PerPictureSelector, "VisualQuery": VisualQuery,
        "Selection": Selection, "strongest": strongest,
    }  # fmt: skip
    try:
        exec(compile(code, "CONTRIBUTING.md", "exec"), names)
        assert kept("longest", query(torch.tensor([[3.0], [1.0], [-4.0], [2.0]])), 2) == [0, 2]
    finally:
        _REGISTRY.pop("longest", None)


@pytest.mark.parametrize("name", PEERS)
def test_cells_that_were_never_encoded_are_refused(name):
    one = VisualQuery(torch.rand(4, 8), (1, 2, 2), torch.rand(1, 8), cells=(1, 4, 4))
    with pytest.raises(InvalidSelectorError, match=r"chooses among encoded tokens.*use mode 'prune'"):
        create_selector(name).select([one], 2)


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("name", PEERS)
@torch.no_grad()
def test_generation_goes_on_from_a_batch_with_several_pictures(family, name):
    model, specs = tiny_model(family), [TWO_IMAGES, SMALL]
    model.generation_config.eos_token_id = None
    budget = 6
    data = inputs_for(family, *specs)
    prepared = prepare(model, data, create_selector(name), budget=budget, on_error="raise")
    assert (prepared["input_ids"] == IMAGE).sum(dim=1).tolist() == [2 * budget, budget]
    together = model.generate(**prepared, max_new_tokens=4, do_sample=False, pad_token_id=EOS)
    new = together[:, prepared["input_ids"].shape[1] :]
    assert new.shape == (2, 4)
    for row, spec in enumerate(specs):
        alone = prepare(model, inputs_for(family, spec, seed=row), create_selector(name), budget=budget)
        text = model.generate(**alone, max_new_tokens=4, do_sample=False, pad_token_id=EOS)
        assert text[0, alone["input_ids"].shape[1] :].tolist() == new[row].tolist()


def recording(name):
    """A selector that remembers its queries."""
    selector = create_selector(name)
    pick, selector.seen = selector.pick, []

    def remember(one, count):
        selector.seen.append(one)
        return pick(one, count)

    selector.pick = remember
    return selector, pick


@pytest.mark.parametrize("name", MERGING)
@torch.no_grad()
def test_deepstack_rows_are_mixed_as_the_tokens_are(name):
    model = tiny_model("qwen3_vl")
    data = inputs_for("qwen3_vl", TWO_IMAGES)
    full = prepare(model, data, create_selector("full"))["mm_encoder_outputs"]["image"]
    selector, pick = recording(name)
    prepared = prepare(model, data, selector, budget=6, on_error="raise")
    mixed = prepared["mm_encoder_outputs"]["image"]
    assert len(mixed.deepstack_features) == 2
    for place, one in enumerate(selector.seen):
        count, width = one.tokens.shape
        # what each token has in each row: the mixture of rows of which each is marked by a column of its own
        marked = pick(replace(one, deepstack=(torch.eye(count, width),)), 6)
        weights = marked.deepstack[0][:, :count]
        assert ((weights != 0).sum(dim=1) > 1).any()
        levels = [(mixed.pooler_output[place], full.pooler_output[place])]
        levels += [
            (own[place], whole[place])
            for own, whole in zip(mixed.deepstack_features, full.deepstack_features, strict=True)
        ]
        for own, whole in levels:
            torch.testing.assert_close(own, weights @ whole, **TOLERANCE)
            assert not torch.allclose(own, whole[marked.indices], atol=1e-3)  # as they would be unmixed
    assert model(**prepared).logits.isfinite().all()


@pytest.mark.parametrize("name", PEERS)
@torch.no_grad()
def test_half_and_half_puts_what_a_peer_made_beside_the_overview(name):
    model = tiny_model("qwen3_vl")
    data = inputs_for("qwen3_vl", [("text", 4), ("image", (1, 16, 16)), ("text", 6)])
    selector = create_selector("half-and-half", selector=name)
    prepared = prepare(model, data, selector, budget=32, on_error="raise")
    assert (prepared["input_ids"] == IMAGE).sum() == 32
    beside, alone = (one["mm_encoder_outputs"]["image"] for one in (
        prepared, prepare(model, data, create_selector(name), budget=16, on_error="raise")
    ))  # fmt: skip
    torch.testing.assert_close(beside.pooler_output[0][16:], alone.pooler_output[0], **TOLERANCE)
    for level, own in zip(beside.deepstack_features, alone.deepstack_features, strict=True):
        torch.testing.assert_close(level[0][16:], own[0], **TOLERANCE)
    assert model(**prepared).logits.isfinite().all()


def test_cdpruner_goes_on_where_no_volume_is_left():
    chance = torch.Generator().manual_seed(0)
    few = torch.randn(12, 24, generator=chance)
    tokens = few.repeat(20, 1) + 0.01 * torch.randn(240, 24, generator=chance)  # 24 dimensions, then only rounding
    query = VisualQuery(tokens=tokens, grid=(1, 12, 20), words=few[:2])
    [selection] = create_selector("cdpruner").select([query], 216)
    assert len(set(selection.indices.tolist())) == 216


@pytest.mark.slow
def test_linear_has_a_hundred_numbers_and_looks_better_than_chance():
    model, processor = load_model("embedded", dtype=torch.float32), load_processor("embedded")
    opened, task = Opened(model, processor), open_task("camouflage", 6, 256)
    inputs = opened.ask([item.question for item in task], [item.open() for item in task])
    found = {}
    for name in ("linear", "random"):
        [contender] = [one for one in open_contenders([name], model) if one.name == name]
        seen = run_contender(opened, open_family(model), inputs, contender, "0.25", answer=False)
        looked = [measure_looking(item, kept, None) for item, kept in zip(task, seen.kept, strict=True)]
        found[name] = sum(one["coverage"] for one in looked) / len(looked)
    assert len(linear._weights(torch.device("cpu"))) <= 100
    assert found["linear"] > found["random"] + 0.3
