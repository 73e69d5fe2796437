"""One suite over every registered selector."""

import pytest
import torch
from drawing import noise, random_tokens

from arr_coc import ARRCOCConfig, TokenSelector, VisualQuery, create_selector, list_selectors, register_selector
from arr_coc.attending import resolve_budget
from arr_coc.selectors.registry import _REGISTRY
from arr_coc.selectors.rules import OracleSelector

WIDTH = 64
# all that pick tokens to a budget
TOKENS = [name for name in list_selectors() if issubclass(_REGISTRY[name], TokenSelector) and name != "full"]


class Boxed(OracleSelector):
    """Has a box for every picture, however many there are."""

    def select(self, queries, budget=None):
        self.boxes = [[(0.1, 0.2, 0.4, 0.5)]] * len(queries)
        return super().select(queries, budget)


def make(name):
    if name == "oracle":
        return Boxed()
    return create_selector(name, **({"config": ARRCOCConfig(hidden_size=WIDTH)} if name == "arr-coc-untrained" else {}))


def query(seed=0, grid=(1, 6, 9), words=5, pictured=True):
    picture = torch.cat([noise(seed + i, grid[1] * 32, grid[2] * 32) for i in range(grid[0])]) if pictured else None
    count = grid[0] * grid[1] * grid[2]

    def attention(layer):
        chance = torch.Generator().manual_seed(seed + round(100 * layer))
        return torch.rand(count, generator=chance) / count

    return VisualQuery(
        tokens=random_tokens(count, WIDTH, seed)[0],
        grid=grid,
        words=random_tokens(words, WIDTH, seed + 1)[0],
        picture=picture,
        attention_reader=attention,
        key_reader=lambda layer: random_tokens(count, 16, seed + 2)[0],
        deepstack=(random_tokens(count, WIDTH, seed + 3)[0],),
        attended=attention(0.5),
    )


@pytest.fixture(name="selector", params=TOKENS)
def make_selector(request):
    return make(request.param)


def test_the_suite_covers_every_selector():
    assert {"arr-coc-untrained", "random", "divprune", "visionzip"} <= set(TOKENS)
    assert not {"full", "downsample", "half-and-half"} & set(TOKENS)
    one = query()
    for budget in (1, 0.1, "auto"):  # `full` has no budget
        assert make("full").select([one], budget)[0].indices.tolist() == list(range(54))


@pytest.mark.parametrize("budget", [1, 10, 1000, 0.3, 1.0, "auto", None])
def test_indices_ascend_and_number_the_budget(selector, budget):
    queries = [query(0), query(1, (1, 4, 4)), query(2, (2, 3, 5), pictured=False)]
    for one, selection in zip(queries, selector.select(queries, budget), strict=True):
        count = one.tokens.shape[0]
        wanted = resolve_budget(0.25 if budget is None else budget, count)
        if wanted is None:
            wanted = min(64, count) if isinstance(selector, torch.nn.Module) else round(0.25 * count)
            assert wanted <= selection.indices.numel() <= count
        else:
            assert selection.indices.numel() == wanted
        assert selection.indices.tolist() == sorted(set(selection.indices.tolist()))
        assert 0 <= selection.indices[0] <= selection.indices[-1] < count


def test_order_and_company_in_the_batch_change_nothing(selector):
    queries = [query(0), query(1), query(2, words=3), query(3, (1, 4, 4))]
    together = selector.select(queries, 12)
    backwards = selector.select(queries[::-1], 12)[::-1]
    alone = [selector.select([one], 12)[0] for one in queries]
    for a, b, c in zip(together, backwards, alone, strict=True):
        assert a.indices.tolist() == b.indices.tolist() == c.indices.tolist()


def test_replacement_rows_fit_and_none_come_where_all_is_kept(selector):
    queries = [query(0), query(2, (2, 3, 5))]
    for one, selection in zip(queries, selector.select(queries, 7), strict=True):
        if selection.features is None:
            assert not selection.deepstack
        else:
            assert selection.features.shape == (7, WIDTH)
            assert [tuple(level.shape) for level in selection.deepstack] == [(7, WIDTH)]
            assert not torch.equal(selection.features, one.tokens[selection.indices])
    for selection in selector.select(queries, 1000):
        assert selection.features is None
        assert selection.deepstack is None


def test_half_precision_goes_in_and_comes_out(selector):
    one = query(0)
    if isinstance(selector, torch.nn.Module):
        selector = selector.to(torch.bfloat16)
    halved = VisualQuery(
        one.tokens.bfloat16(), one.grid, one.words.bfloat16(), picture=one.picture,
        attention_reader=one.attention_reader, key_reader=lambda layer: one.keys(layer).bfloat16(),
        deepstack=tuple(level.bfloat16() for level in one.deepstack), attended=one.attended,
    )  # fmt: skip
    first, again = (selector.select([halved], 9)[0] for _ in range(2))
    assert torch.equal(first.indices, again.indices)
    assert len(first.indices) == 9
    if first.features is not None:
        assert {rows.dtype for rows in (first.features, *first.deepstack)} == {torch.bfloat16}
        assert torch.equal(first.features, again.features)


def test_nothing_to_select_is_nothing(selector):
    assert selector.select([], 12) == []


@pytest.mark.parametrize(("budget", "error"), [(0, ValueError), (-1, ValueError), (1.5, ValueError), ("x", ValueError)])
def test_bad_budgets_are_refused(selector, budget, error):
    with pytest.raises(error, match="`budget`"):
        selector.select([query()], budget)


def test_centre_keeps_the_middle_and_random_its_seed():
    one = query(0, (1, 5, 5))
    assert make("centre").select([one], 1)[0].indices.tolist() == [12]
    first, again = (create_selector("random", seed=3).select([one], 8)[0].indices for _ in range(2))
    other = create_selector("random", seed=4).select([one], 8)[0].indices
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_names_are_given_once_and_unknown_ones_list_the_known():
    with pytest.raises(ValueError, match="'random' is already registered"):
        register_selector("random")(type(make("grid")))
    with pytest.raises(ValueError, match=r"no selector is named 'best'; there are arr-coc-untrained, .*centre, .*tome"):
        create_selector("best")


def test_arguments_a_selector_does_not_take_are_named():
    with pytest.raises(TypeError, match=r"selector 'grid' takes \(\).*: got an unexpected keyword argument 'seed'"):
        create_selector("grid", seed=3)
    with pytest.raises(
        TypeError, match=r"selector 'arr-coc-untrained' takes .*config.*: missing a required argument: 'config'"
    ):
        create_selector("half-and-half", selector="arr-coc-untrained")


def test_a_new_selector_is_a_class_with_one_method():
    @register_selector("first-for-test")
    class First(TokenSelector):
        def select(self, queries, budget=None):
            return []

    try:
        assert isinstance(create_selector("first-for-test"), First)
    finally:
        del _REGISTRY["first-for-test"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": torch.rand(5, WIDTH)}, r"`tokens` must have shape \[54, D\]"),
        ({"words": torch.rand(2, 7)}, r"`words` must have shape \[Q, 64\]"),
        ({"words": torch.rand(0, WIDTH)}, "at least one word"),
        ({"picture": torch.rand(2, 3, 8, 8)}, r"`picture` must have shape \[1, 3, H, W\]"),
        ({"deepstack": (torch.rand(54, WIDTH), torch.rand(53, WIDTH))}, r"shape \(54, 64\), got \(53, 64\)"),
        ({"cells": (2, 6, 9)}, "frames of `grid`"),
        ({"grid": (0, 6, 9)}, "`grid` must be"),
    ],
)
def test_queries_that_do_not_fit_are_refused(changes, says):
    one = query()
    values = {"tokens": one.tokens, "grid": one.grid, "words": one.words, "picture": one.picture, **changes}
    with pytest.raises(ValueError, match=says):
        VisualQuery(**values)


def test_encoder_readers_are_called_lazily_and_their_absence_is_said():
    asked = []

    def read(layer):
        asked.append(layer)
        return torch.zeros(54)

    one = query()
    with_reader = VisualQuery(tokens=one.tokens, grid=one.grid, words=one.words, attention_reader=read)
    assert asked == []
    assert with_reader.received_attention(3).shape == (54,)
    assert asked == [3]
    with pytest.raises(ValueError, match="carries no encoder to read keys from"):
        with_reader.keys(3)
