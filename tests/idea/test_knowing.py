import pytest
import torch
from drawing import flat, noise, random_tokens, red_dot, street, with_text

from arr_coc import ARRCOCConfig, generate_texture_array
from arr_coc.knowing import InformationScorer, ParticipatoryScorer, PerspectivalScorer
from arr_coc.texture import CHANNELS

CONFIG = ARRCOCConfig(hidden_size=64)
GRID = (1, 8, 8)


def texture_of(picture, grid=(8, 8), channels="full"):
    return generate_texture_array(picture, grid, channels)


def participate(tokens, words, texture=None, mask=None, scorer=None):
    scorer = scorer or ParticipatoryScorer(CONFIG)
    return scorer(texture_of(flat()) if texture is None else texture, tokens, words, GRID, mask)


@pytest.mark.parametrize("channels", ["core", "full"])
def test_a_busy_cell_outranks_a_blank_one(channels):
    picture = flat(0.5)
    picture[:, :, 64:96, 96:128] = noise(0, 32, 32)
    score = InformationScorer(ARRCOCConfig(hidden_size=8, channels=channels))(texture_of(picture, (8, 8), channels))[0]
    assert score.flatten().argmax() == 2 * 8 + 3
    assert score[2, 3] > 2 * score[6, 6]
    assert score[2, 3] > score[2, 4] > score[6, 6]  # its neighbour gets less, what is far away nothing


@pytest.mark.parametrize("value", [0.0, 0.03, 0.5, 0.77, 1.0])
def test_a_blank_picture_has_no_information_whatever_its_gray(value):
    score = InformationScorer(CONFIG)(texture_of(flat(value)))
    assert score.max() < 0.02


def test_a_page_of_text_is_informative_although_its_cells_are_all_alike():
    page = with_text(flat(1.0, 512, 512), "\n".join(["lorem ipsum dolor sit amet consectetur adipi"] * 30), (8, 8), 14)
    blank = flat(1.0, 512, 512)
    scorer = InformationScorer(CONFIG)
    assert scorer(texture_of(page, (16, 16)))[0, 4:9, 4:9].min() > 0.05
    assert scorer(texture_of(blank, (16, 16))).max() < 0.02


def test_softmax_entropy_over_channels_would_have_the_wrong_sign():
    """The mistake that the histogram avoids: a flat vector has the highest softmax entropy."""
    picture = flat(0.5)
    picture[:, :, 64:96, 96:128] = noise(0, 32, 32)
    texture = texture_of(picture)
    busy = texture[:, [CHANNELS["full"][name] for name in ("edges", "high_pass", "text", "saliency")]]
    naive = torch.special.entr(torch.softmax(busy, dim=1)).sum(dim=1)[0]
    assert naive[2, 3] < naive[6, 6]


@pytest.mark.parametrize("channels", ["core", "full"])
def test_untrained_perspective_is_the_mean_of_the_saliency_channels(channels):
    texture = texture_of(street(), (16, 16), channels)
    score = PerspectivalScorer(ARRCOCConfig(hidden_size=8, channels=channels))(texture)
    names = {"core": ["saliency_intensity", "saliency_color", "saliency_orientation"], "full": ["saliency"]}[channels]
    expected = texture[:, [CHANNELS[channels][name] for name in names]].mean(dim=1)
    torch.testing.assert_close(score, expected, atol=2e-5, rtol=0)


def test_a_learned_correction_changes_perspective():
    scorer = PerspectivalScorer(CONFIG)
    texture = texture_of(street(), (16, 16))
    before = scorer(texture)
    torch.nn.init.constant_(scorer.correction[-1].weight, 5.0)
    assert (scorer(texture) - before).abs().max() > 0.01


def test_the_red_dot_stands_out():
    score = PerspectivalScorer(CONFIG)(texture_of(red_dot(), (16, 16)))[0]
    row, column = divmod(score.flatten().argmax().item(), 16)
    assert abs(row - 180 // 32) <= 1
    assert abs(column - 300 // 32) <= 1


def test_a_word_that_matches_one_token_puts_that_cell_first():
    tokens, words = random_tokens(64), random_tokens(5, seed=1)
    words[0, 3] = 2.5 * tokens[0, 37]
    found = participate(tokens, words)
    assert found.score.flatten().argmax() == 37
    assert found.pull[0, 3].flatten().argmax() == 37
    assert found.match > 1
    assert participate(tokens, random_tokens(5, seed=2)).match < 1


@pytest.mark.parametrize("silent", [0, 3, 15, 60])
def test_words_that_say_nothing_do_not_make_chance_a_match(silent):
    """A deviation pooled over all words would: the more of them are silent, the more the one that is not stands out."""
    for seed in range(5):
        tokens = torch.zeros(1, 256, 64)
        tokens[..., :32] = random_tokens(256, 32, seed)
        words = torch.zeros(1, 1 + silent, 64)
        words[0, 0, :32] = random_tokens(1, 32, seed + 50)[0]
        words[0, 1:, 32:] = random_tokens(silent, 32, seed + 99)[0]  # where no token lies
        texture = texture_of(flat(0.5, 512, 512), (16, 16))
        assert ParticipatoryScorer(CONFIG)(texture, tokens, words, (1, 16, 16)).match < 1


def test_a_word_that_points_to_a_region_is_a_match():
    tokens = random_tokens(256)
    tokens[0].view(16, 16, 64)[:, :8, 0] += 6
    words = torch.zeros(1, 1, 64)
    words[0, 0, 0] = 1
    assert ParticipatoryScorer(CONFIG)(texture_of(flat(0.5, 512, 512), (16, 16)), tokens, words, (1, 16, 16)).match > 1


def test_two_matching_words_beat_one_although_the_mean_word_would_not():
    tokens = torch.zeros(1, 64, 64)
    tokens[0, :, 8:] = 0.03 * random_tokens(64, 56)[0]
    tokens[0, 10, 0] = tokens[0, 20, 1] = 1.0
    tokens[0, 30, :2] = 0.7  # matches both, each less than the others match one
    words = torch.zeros(1, 9, 64)
    words[0, 0, 0] = words[0, 1, 1] = 1.0
    words[0, 2:, 40:47] = torch.eye(7)  # and seven words that are not in the picture
    score = participate(tokens, words).score.flatten()
    assert score.topk(3).indices.tolist()[0] == 30
    assert set(score.topk(3).indices.tolist()) == {10, 20, 30}


def test_where_the_row_of_one_word_crosses_the_column_of_another_can_be_learned():
    tokens, words = random_tokens(64), random_tokens(4, seed=1)
    words[0, 1], words[0, 2] = tokens[0, 8 * 1 + 2], tokens[0, 8 * 5 + 6]
    corners = {8 * 1 + 2, 8 * 5 + 6, 8 * 1 + 6, 8 * 5 + 2}
    scorer = ParticipatoryScorer(CONFIG)
    before = participate(tokens, words, scorer=scorer).score
    assert set(before.flatten().topk(4).indices.tolist()) != corners
    with torch.no_grad():
        scorer.aligned[2] = 1.0
    after = participate(tokens, words, scorer=scorer).score
    assert set(after.flatten().topk(4).indices.tolist()) == corners
    assert 0 <= after.min() <= after.max() <= 1
    with torch.no_grad():
        scorer.aligned.copy_(torch.tensor([1.0, 0.0, 0.0]))
    rows = participate(tokens, words, scorer=scorer).score[0, 0].mean(dim=1)
    assert set(rows.topk(2).indices.tolist()) == {1, 5}


def test_all_words_together_may_learn_to_speak_against_a_cell():
    tokens, words = random_tokens(64), random_tokens(2, seed=1)
    scorer = ParticipatoryScorer(CONFIG)
    texture = torch.zeros(1, len(CHANNELS["full"]), 8, 8)
    texture[:, CHANNELS["full"]["x"]] = torch.linspace(0, 1, 8)
    mask = torch.tensor([[True, False]])
    before = scorer(texture, tokens, words, (1, 8, 8), mask).score
    with torch.no_grad():  # the first word is for what is on the left, the second, which is padding, for the right
        asked = scorer.read_words(words[0, :1] / words[0, :1].norm())[0]
        scorer.leaning[:, CHANNELS["full"]["x"]] = -3 * asked / asked.square().sum()
    after = scorer(texture, tokens, words, (1, 8, 8), mask).score
    assert 0 <= after.min() <= after.max() <= 1
    left_to_right = after[0, 0].mean(dim=0)
    # also among cells that are all on the right side, where no word pulls
    assert (left_to_right.diff() < 0).all()
    assert not (before[0, 0].mean(dim=0).diff() < 0).all()


def test_padding_words_never_count():
    tokens, words = random_tokens(64), random_tokens(4, seed=1)
    padding = torch.cat([words, 100 * tokens[:, 5:8]], dim=1)  # would match cells 5 to 7 if it counted
    mask = torch.tensor([[True] * 4 + [False] * 3])
    scorer = ParticipatoryScorer(CONFIG)
    alone, padded = participate(tokens, words, scorer=scorer), participate(tokens, padding, mask=mask, scorer=scorer)
    torch.testing.assert_close(padded.score, alone.score)
    torch.testing.assert_close(padded.match, alone.match)
    torch.testing.assert_close(padded.question, alone.question)
    assert padded.pull[0, 4:].abs().max() == 0
    assert not torch.allclose(participate(tokens, padding).score, alone.score)


def test_a_word_that_is_everywhere_pulls_nowhere():
    tokens = random_tokens(64) * 0.1
    tokens[..., 0] = 3.0
    words = torch.zeros(1, 1, 64)
    words[..., 0] = 1.0
    assert participate(tokens, words).pull.abs().max() < 0.05


def test_scale_of_tokens_and_words_does_not_matter():
    tokens, words = random_tokens(64), random_tokens(5, seed=1)
    torch.testing.assert_close(participate(tokens, words).score, participate(7 * tokens, 0.01 * words).score)


def test_the_learned_form_sees_texture():
    scorer = ParticipatoryScorer(CONFIG)
    tokens, words = random_tokens(64), random_tokens(5, seed=1)
    one, other = texture_of(red_dot(256, place=(40, 40))), texture_of(red_dot(256, place=(200, 200)))
    torch.testing.assert_close(
        participate(tokens, words, one, scorer=scorer).score, participate(tokens, words, other, scorer=scorer).score
    )
    torch.nn.init.normal_(scorer.agree, generator=torch.Generator().manual_seed(0))
    changed = participate(tokens, words, one, scorer=scorer), participate(tokens, words, other, scorer=scorer)
    assert not torch.allclose(changed[0].score, changed[1].score)


def test_frames_of_a_clip_are_judged_together():
    tokens = random_tokens(128)
    words = tokens[:, 100:101].clone()
    texture = texture_of(torch.cat([flat(), flat()]))
    found = ParticipatoryScorer(CONFIG)(texture, tokens, words, (2, 8, 8))
    assert found.score.shape == (1, 2, 8, 8)
    assert found.score.flatten().argmax() == 100


def test_relevance_can_be_asked_on_finer_cells_than_the_tokens():
    tokens = random_tokens(16)
    texture = texture_of(flat(), (12, 12))
    found = ParticipatoryScorer(CONFIG)(texture, tokens, tokens[:, 6:7], (1, 4, 4))
    assert found.score.shape == (1, 1, 12, 12)
    row, column = divmod(found.score.flatten().argmax().item(), 12)
    assert (row // 3, column // 3) == (1, 2)
