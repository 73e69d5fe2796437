import pytest
import torch
from drawing import random_tokens

from arr_coc import ARRCOCConfig
from arr_coc.balancing import AdaptiveTensionBalancer
from arr_coc.knowing import Participation

CONFIG = ARRCOCConfig(hidden_size=64)


def spot(strength, place=(3, 4)):
    values = torch.full((1, 1, 8, 8), 0.1)
    values[0, 0, place[0], place[1]] += strength
    return values


def found(score, seed=0):
    question, gestalt = (
        random_tokens(2, CONFIG.low_rank, seed)[:, :1, :].squeeze(1),
        random_tokens(2, CONFIG.low_rank, seed + 1)[:, 1],
    )
    return Participation(score, score[:, None], torch.zeros(score.shape[0]), gestalt, question)


def test_weights_start_equal_for_maps_of_equal_strength():
    weights = AdaptiveTensionBalancer(CONFIG)(spot(0.3), spot(0.3, (1, 1)), found(spot(0.3, (6, 6)))).weights[0]
    torch.testing.assert_close(weights, weights[:1].expand(3))


def test_weak_saliency_everywhere_lowers_the_perspectival_weight():
    balancer = AdaptiveTensionBalancer(CONFIG)
    weights = [balancer(spot(0.3), spot(s), found(spot(0.3))).weights[0] for s in (0.0, 0.1, 0.3)]
    assert weights[0][1] < weights[1][1] < weights[2][1]
    torch.testing.assert_close(weights[0][[0, 2]], weights[2][[0, 2]])


def test_weights_are_not_a_softmax():
    balancer = AdaptiveTensionBalancer(CONFIG)
    strong = balancer(spot(0.5), spot(0.5), found(spot(0.5)))
    weak = balancer(spot(0.06), spot(0.06), found(spot(0.06)))
    assert strong.weights.sum() > 2 > 1 > weak.weights.sum()
    assert strong.relevance.max() > 2 * weak.relevance.max()  # and it matters: relevance is not normalised away


def test_a_question_that_points_nowhere_explores():
    balancer = AdaptiveTensionBalancer(CONFIG)
    explore = [balancer(spot(0.3), spot(0.3), found(spot(s))).tensions[0, 1].item() for s in (0.0, 0.2, 0.6)]
    assert explore[0] > explore[1] > explore[2]


def test_relevance_lies_between_0_and_1_and_follows_the_heavier_map():
    balancer = AdaptiveTensionBalancer(CONFIG)
    relevance = balancer(spot(0.02, (0, 0)), spot(0.02, (7, 7)), found(spot(0.5, (3, 4)))).relevance
    assert relevance.shape == (1, 1, 8, 8)
    assert relevance.flatten().argmax() == 3 * 8 + 4
    assert relevance.min() >= 0
    assert relevance.max() <= 1


def test_a_flat_map_is_not_stretched_into_noise():
    balancer = AdaptiveTensionBalancer(CONFIG)
    almost = 0.4 + 1e-4 * torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    relevance = balancer(almost, almost, found(spot(0.5))).relevance
    assert relevance.flatten().topk(2).values[1] < 0.01


def test_question_and_gestalt_decide_once_something_is_learned():
    balancer = AdaptiveTensionBalancer(CONFIG)
    maps = spot(0.3), spot(0.2)
    before = [balancer(*maps, found(spot(0.3), seed)) for seed in (0, 5)]
    torch.testing.assert_close(before[0].weights, before[1].weights)
    torch.nn.init.normal_(balancer.correction[-1].weight, generator=torch.Generator().manual_seed(0))
    after = [balancer(*maps, found(spot(0.3), seed)) for seed in (0, 5)]
    assert not torch.allclose(after[0].weights, after[1].weights, atol=1e-3)
    assert not torch.allclose(after[0].tensions, after[1].tensions, atol=1e-3)


def test_gradients_are_finite_even_for_flat_maps():
    balancer = AdaptiveTensionBalancer(CONFIG)
    flat = torch.full((1, 1, 8, 8), 0.3, requires_grad=True)
    balance = balancer(flat, flat, found(flat))
    (balance.relevance.sum() + balance.weights.sum() + balance.tensions.sum()).backward()
    assert bool(flat.grad.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in balancer.parameters() if p.grad is not None)


@pytest.mark.parametrize("index", range(3))
def test_tensions_start_neutral_and_can_be_learned(index):
    balancer = AdaptiveTensionBalancer(CONFIG)
    ordinary = spot(0.2 * 64 / 63)  # its best cell lies 0.2 above its mean
    start = balancer(ordinary, ordinary, found(ordinary)).tensions[0]
    assert start.tolist() == pytest.approx([0.5, 0.2, 0.2], abs=1e-5)
    with torch.no_grad():
        balancer.neutral[3 + index] += 2
    moved = balancer(ordinary, ordinary, found(ordinary)).tensions[0]
    assert moved[index] > start[index] + 0.2
    others = [i for i in range(3) if i != index]
    torch.testing.assert_close(moved[others], start[others])


def test_relevance_learns_to_spread_to_neighbouring_cells():
    balancer = AdaptiveTensionBalancer(CONFIG)
    peak = torch.zeros(1, 1, 5, 5)
    peak[0, 0, 2, 2] = 1.0
    assert torch.equal(balancer._spread_around(peak), peak)  # not before
    with torch.no_grad():
        balancer.spread.copy_(torch.tensor([0.5, 0.25]))
    lit = balancer._spread_around(peak)[0, 0]
    assert lit[2, 2] == 1
    assert lit[2, 1] == lit[2, 3] > lit[1, 2] == lit[3, 2] > lit[1, 1] == 0
