import pytest
import torch
from drawing import discs, flat, noise, random_tokens, red_dot, splatter, street
from hypothesis import given, settings
from hypothesis import strategies as st

from arr_coc import ARRCOCConfig, generate_texture_array
from arr_coc.attending import TokenAllocator, finish_plan, resolve_budget, spread_rank
from arr_coc.pixels.saliency import picture_structure
from arr_coc.texture import CHANNELS

CPU = torch.device("cpu")


def allocator():
    return TokenAllocator(ARRCOCConfig(hidden_size=64))


def tension(detail=0.5, explore=0.0, variety=0.0, batch=1):
    return torch.tensor([[detail, explore, variety]]).expand(batch, -1)


def allocate(relevance, budget, features=None, **tensions):
    count = relevance[0].numel()
    features = random_tokens(count, 64, batch=relevance.shape[0]) if features is None else features
    return allocator()(relevance, features, tension(batch=relevance.shape[0], **tensions), budget)


def structure_of(picture, grid=(16, 16)):
    names = ("red", "green", "blue", "edges", "high_pass")
    texture = generate_texture_array(picture, grid, "full")
    return picture_structure(texture[:, [CHANNELS["full"][name] for name in names]]).item()


@pytest.mark.parametrize(
    ("budget", "total", "kept"),
    [(7, 100, 7), (100, 64, 64), (0.25, 100, 25), (1.0, 64, 64), (1, 64, 1), (0.001, 100, 1), (0.5, 5, 2), (0.9, 1, 1)],
)
def test_the_budget_rule(budget, total, kept):
    assert resolve_budget(budget, total) == kept
    relevance = torch.rand(1, 1, 1, total, generator=torch.Generator().manual_seed(0))
    assert allocate(relevance, budget).num_kept.tolist() == [kept]


@settings(max_examples=60, deadline=None)
@given(
    frames=st.integers(1, 3),
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    budget=st.one_of(st.integers(1, 500), st.floats(0.001, 1.0), st.just("auto")),
    tensions=st.tuples(*[st.floats(0, 1)] * 3),
    batch=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_any_call_keeps_exactly_its_budget_in_ascending_order(frames, rows, columns, budget, tensions, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    relevance = torch.rand(batch, frames, rows, columns, generator=generator)
    total = frames * rows * columns
    allocation = allocator()(
        relevance, random_tokens(total, 16, seed, batch), torch.tensor([tensions]).expand(batch, -1), budget
    )
    wanted = resolve_budget(budget, total)
    for row in range(batch):
        kept = int(allocation.num_kept[row])
        if wanted is None:
            assert min(64 * frames, total) <= kept <= min(400 * frames, total)
        else:
            assert kept == wanted
        indices = allocation.indices[row]
        assert allocation.mask[row].tolist() == [True] * kept + [False] * (indices.numel() - kept)
        assert indices[:kept].tolist() == sorted(set(indices[:kept].tolist()))
        assert 0 <= indices.min() <= indices.max() < total
        assert torch.equal(allocation.budgets[row, :kept], relevance[row].flatten()[indices[:kept]])
        assert allocation.budgets[row, kept:].sum() == 0


def test_the_most_relevant_cells_are_kept():
    relevance = torch.rand(1, 1, 10, 10, generator=torch.Generator().manual_seed(1))
    kept = allocate(relevance, 13).indices[0]
    assert set(kept.tolist()) == set(relevance.flatten().topk(13).indices.tolist())


def test_equal_relevance_is_settled_by_place_not_by_chance():
    assert allocate(torch.full((1, 1, 4, 4), 0.5), 5).indices.tolist() == [[0, 1, 2, 3, 4]]


def test_automatic_budget_reaches_both_ends():
    focused = torch.zeros(1, 1, 32, 32)
    focused[0, 0, 5, 5] = 1.0
    spread = torch.full((1, 1, 32, 32), 0.5)
    between = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    counts = [int(allocate(x, "auto").num_kept[0]) for x in (focused, between, spread)]
    assert counts[0] == 64
    assert counts[2] == 400
    assert 64 < counts[1] < 400


def test_the_limits_of_the_automatic_budget_are_those_of_one_frame():
    spread, focused = torch.full((1, 4, 32, 32), 0.5), torch.zeros(1, 4, 32, 32)
    focused[0, 2, 5, 5] = 1.0
    assert int(allocate(spread, "auto").num_kept[0]) == 4 * 400
    assert int(allocate(focused, "auto").num_kept[0]) == 4 * 64


def test_a_plain_softmax_would_always_ask_for_the_most():
    """The mistake that the sharpening avoids."""
    focused = torch.zeros(1024)
    focused[77] = 1.0
    plain = torch.special.entr(torch.softmax(focused, dim=0)).sum() / torch.tensor(1024.0).log()
    assert plain > 0.99
    assert allocator().automatic_count(focused[None], torch.tensor([0.5]))[1] < 0.01


def test_detail_moves_the_automatic_count_and_only_that():
    relevance = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    counts = [int(allocate(relevance, "auto", detail=detail).num_kept[0]) for detail in (0.2, 0.5, 0.8)]
    assert counts[0] < counts[1] < counts[2]
    fixed = [allocate(relevance, 90, detail=detail).indices for detail in (0.2, 0.8)]
    assert torch.equal(*fixed)


def test_the_automatic_count_is_differentiable():
    one = allocator()
    relevance = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tensions = tension().clone().requires_grad_()
    one.plan(relevance, random_tokens(1024), tensions, 64).expected.sum().backward()
    for value in (relevance, one.steepness, one.offset):
        assert value.grad.abs().sum() > 0
    assert tensions.grad[0, 0] > 0
    assert tensions.grad[0, 1:].tolist() == [0, 0]  # the other two act on which cells, not on how many


def test_explore_spends_its_share_on_regions_not_yet_visited():
    relevance = torch.zeros(1, 1, 16, 16)
    relevance[0, 0, :8, :8] = 1.0
    shares = []
    for explore in (0.0, 0.5, 1.0):
        kept = allocate(relevance, 64, explore=explore).indices[0]
        far = (kept // 16 >= 8) | (kept % 16 >= 8)
        shares.append(far.float().mean().item())
    assert shares == pytest.approx([0.0, 0.25, 0.5], abs=0.05)
    kept = allocate(relevance, 64, explore=1.0).indices[0]
    quarters = {(int(i) // 16 // 8, int(i) % 16 // 8) for i in kept}
    assert quarters == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_explore_avoids_what_earlier_frames_looked_at():
    relevance = torch.zeros(1, 1, 16, 16)
    relevance[0, 0, 0, :4] = 1.0
    visited = torch.zeros(1, 256, dtype=torch.bool)
    visited[0, 128:] = True
    one, tensions, features = allocator(), tension(explore=1.0), random_tokens(256, 16)
    fresh = one.plan(relevance, features, tensions, 8).indices[0]
    again = one.plan(relevance, features, tensions, 8, visited=visited).indices[0]
    assert (fresh >= 128).any()
    assert not (again >= 128).any()


def test_variety_suppresses_near_duplicates():
    features = random_tokens(64, 64)
    features[0, :20] = features[0, 0] + 0.01 * random_tokens(20, 64, seed=2)[0]  # twenty of a kind
    relevance = torch.linspace(1, 0.2, 64).view(1, 1, 8, 8)
    focused = allocate(relevance, 20, features, variety=0.0).indices[0]
    diverse = allocate(relevance, 20, features, variety=1.0).indices[0]
    assert (focused < 20).sum() == 20
    assert (diverse < 20).sum() <= 2
    assert 0 in diverse.tolist()  # the best of the kind stays


def test_pictures_of_a_batch_get_their_own_lengths():
    relevance = torch.stack([torch.full((1, 32, 32), 0.5), torch.zeros(1, 32, 32)])
    relevance[1, 0, 3, 3] = 1.0
    allocation = allocate(relevance, "auto")
    assert allocation.num_kept.tolist() == [400, 64]
    assert allocation.mask.sum(dim=1).tolist() == [400, 64]


@pytest.mark.parametrize("grid", [(1, 16, 16), (1, 5, 11), (1, 1, 7), (3, 6, 9)])
def test_every_beginning_of_the_spread_order_is_even(grid):
    rank = spread_rank(grid, CPU)
    assert rank.sort().values.tolist() == list(range(rank.numel()))
    if grid == (1, 16, 16):
        for kept in (4, 16, 64):
            chosen = (rank < kept).view(16, 16).float()
            assert torch.nn.functional.avg_pool2d(chosen[None, None], 8).unique().numel() == 1
    if grid[0] == 3:
        first = (rank < 54).view(3, -1).sum(dim=1)
        assert first.min() >= 12
        assert len({tuple((rank < 54).view(3, -1)[frame].tolist()) for frame in range(3)}) > 1


@pytest.mark.parametrize("seed", range(4))
def test_noise_and_splatter_have_no_structure(seed):
    assert structure_of(noise(seed)) < 1
    assert structure_of(splatter(seed)) < 1
    assert structure_of(splatter(seed, strokes=250)) < 1


def test_flat_fields_have_no_structure():
    assert structure_of(flat(0.6, 512, 512)) == 0


def test_things_have_structure():
    assert structure_of(street()) > 1
    assert structure_of(red_dot()) > 1
    assert structure_of(discs((16, 16), lambda row, column: (200, 0, 0) if row < 8 else (0, 0, 200))) > 1


def test_the_grid_is_taken_only_without_structure_and_without_match():
    relevance = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    structure, match = torch.tensor([0.5, 0.5, 2.0, 2.0]), torch.tensor([0.0, 1.5, 0.0, 1.5])
    features = random_tokens(256, 16, batch=4)
    allocation = allocator()(relevance, features, tension(batch=4), 64, structure, match)
    assert allocation.strategy == ("grid", "relevance", "relevance", "relevance")
    assert "no structure" in allocation.reason[0]
    assert "points to a place" in allocation.reason[1]
    even = spread_rank((1, 16, 16), CPU) < 64
    assert torch.equal(allocation.indices[0], even.nonzero()[:, 0])
    everything = allocator()(relevance, features, tension(batch=4), 1.0, structure, match)
    assert set(everything.strategy) == {"all"}
    without_picture = allocator()(relevance, features, tension(batch=4), 64, None, match)
    assert set(without_picture.strategy) == {"relevance"}


def test_the_model_itself_says_where_to_look_or_that_it_does_not_know():
    relevance = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    structure, match, focus = torch.tensor([0.5, 0.5]), torch.zeros(2), torch.tensor([0.6, 1.4])
    features = random_tokens(256, 16, batch=2)
    plan = allocator().plan(relevance, features, tension(batch=2), 64, structure, match, focus=focus)
    asked = finish_plan(plan, plan.report.tolist(), 256)
    assert asked.strategy == ("grid", "relevance")
    assert "nor does the model itself look at one (0.60; noise is below 1)" in asked.reason[0]
    assert "by where the model itself looks" in asked.reason[1]
    plan = allocator().plan(relevance, features, tension(batch=2), 64, structure, match)
    assert finish_plan(plan, plan.report.tolist(), 256).strategy == ("grid", "grid")


def test_where_the_model_looks_nowhere_picture_and_question_must_say_more():
    relevance = torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    structure, match = torch.tensor([1.3, 1.5, 1.3]), torch.tensor([1.2, 1.2, 1.3])
    features, focus = random_tokens(256, 16, batch=3), torch.full((3,), 0.6)
    plan = allocator().plan(relevance, features, tension(batch=3), 64, structure, match, focus=focus)
    silent = finish_plan(plan, plan.report.tolist(), 256)
    assert silent.strategy == ("grid", "relevance", "relevance")
    assert "noise is below 1.4" in silent.reason[0]
    plan = allocator().plan(relevance, features, tension(batch=3), 64, structure, match)
    assert set(finish_plan(plan, plan.report.tolist(), 256).strategy) == {"relevance"}  # nobody asked the model


def test_a_word_is_kept_whole_where_one_of_its_letters_is_relevant():
    relevance = torch.full((1, 1, 4, 8), 0.3)
    relevance[0, 0, 1, 3] = 0.9
    relevance[0, 0, 3, 6] = 0.6
    text = torch.zeros(1, 1, 4, 8)
    text[0, 0, 1, 2:6] = 0.4
    features, exploit = torch.randn(1, 32, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 3)
    make = TokenAllocator(ARRCOCConfig(hidden_size=16))
    kept = [make.plan(relevance, features, exploit, 5, text=one).indices[0].tolist() for one in (text, None)]
    assert kept[0] == [10, 11, 12, 13, 30]  # and then what is next by itself
    assert not {10, 12, 13} <= set(kept[1])
