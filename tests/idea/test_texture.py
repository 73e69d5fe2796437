import pytest
import torch
import torch.nn.functional as F
from drawing import discs, flat, noise, red_dot, street, tensor, with_text
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from arr_coc import CHANNELS, generate_texture_array
from arr_coc.pixels.mipmaps import gradient, halve, halve_peaks, peaks_around, resize
from arr_coc.texture import PreviousFrame


def channel(texture, name):
    return texture[0, CHANNELS["core" if texture.shape[1] == 13 else "full"][name]]


def test_channel_table_has_the_published_places():
    assert (len(CHANNELS["core"]), len(CHANNELS["full"])) == (13, 40)
    assert list(CHANNELS["core"])[5:8] == ["sobel_x", "sobel_y", "sobel_magnitude"]
    full = CHANNELS["full"]
    assert (full["motion"], full["saliency"], full["edge_distance"], full["text"]) == (10, 11, 12, 16)
    assert (full["semantic_0"], full["semantic_15"], full["carried_relevance"]) == (17, 32, 33)
    assert (full["fixation_history"], full["detail_lost"], full["detail_lost_octave"]) == (37, 38, 39)


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    channels=st.sampled_from(["core", "full"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 999),
)
def test_any_size_gives_finite_values_between_0_and_1(height, width, rows, columns, channels, dtype, seed):
    picture = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    texture = generate_texture_array(picture, (rows, columns), channels)
    assert texture.shape == (2, len(CHANNELS[channels]), rows, columns)
    assert texture.dtype == dtype
    assert bool(((texture >= 0) & (texture <= 1)).all())


@pytest.mark.parametrize("channels", ["core", "full"])
@pytest.mark.parametrize(("size", "grid"), [((96, 128), (3, 4)), ((101, 77), (5, 3)), ((40, 40), (7, 9))])
def test_rgb_is_adaptive_average_pooling(size, grid, channels):
    picture = noise(1, *size)
    texture = generate_texture_array(picture, grid, channels)
    torch.testing.assert_close(texture[:, :3], F.adaptive_avg_pool2d(picture, grid))


@pytest.mark.parametrize("channels", ["core", "full"])
def test_half_precision_is_the_same_picture(channels):
    picture = street()
    exact = generate_texture_array(picture, (16, 16), channels)
    for dtype, tolerance in ((torch.float16, 0.01), (torch.bfloat16, 0.06)):
        close = generate_texture_array(picture.to(dtype), (16, 16), channels).float()
        assert (close - exact).abs().mean() < tolerance / 10
        assert (close - exact).abs().max() < 4 * tolerance


@pytest.mark.parametrize("channels", ["core", "full"])
def test_a_batch_is_its_pictures_one_by_one(channels):
    pictures = torch.cat([street(), noise(2), red_dot()])
    together = generate_texture_array(pictures, (16, 16), channels)
    for index in range(3):
        alone = generate_texture_array(pictures[index : index + 1], (16, 16), channels)
        torch.testing.assert_close(together[index : index + 1], alone)


def test_positions_run_from_0_to_1():
    texture = generate_texture_array(flat(), (4, 6), "full")
    assert channel(texture, "y")[:, 0].tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert channel(texture, "x")[0].tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert channel(texture, "eccentricity")[0, 0] == pytest.approx(1)
    assert channel(generate_texture_array(flat(), (5, 5), "full"), "eccentricity")[2, 2] == pytest.approx(0)


@pytest.mark.parametrize("size", [(6, 8), (7, 8), (6, 9), (5, 3), (1, 1), (1, 4)])
def test_the_fast_kernels_are_those_of_torch(size):
    maps = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0)) - 0.5
    torch.testing.assert_close(halve(maps), F.avg_pool2d(maps, 2, ceil_mode=True, count_include_pad=False))
    assert torch.equal(halve_peaks(maps), F.max_pool2d(maps, 2, ceil_mode=True))
    assert torch.equal(peaks_around(maps), F.max_pool2d(maps, 3, stride=1, padding=1))
    for target in ((6, 9), (3, 2)):
        torch.testing.assert_close(resize(maps, target), F.interpolate(maps, size=target, mode="bilinear"))
    sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
    kernel = torch.stack([sobel, sobel.T])[:, None]
    derivatives, length = gradient(maps[:, :1])
    expected = F.conv2d(F.pad(maps[:, :1], (1, 1, 1, 1), mode="replicate"), kernel)
    torch.testing.assert_close(derivatives, expected)
    torch.testing.assert_close(length, expected.norm(dim=1, keepdim=True))
    if size != (1, 1):  # the control: axes are not mixed up
        assert not torch.allclose(derivatives, expected.flip(1))


def test_a_vertical_edge_lights_sobel_x_and_not_y():
    picture = flat(0.2)
    picture[..., 112:] = 0.9
    texture = generate_texture_array(picture, (8, 8))
    assert channel(texture, "sobel_x")[4, 3] > 0.52
    torch.testing.assert_close(channel(texture, "sobel_y"), torch.full((8, 8), 0.5))
    falling = generate_texture_array(1.1 - picture, (8, 8))
    assert channel(falling, "sobel_x")[4, 3] < 0.48
    turned = generate_texture_array(picture.mT.contiguous(), (8, 8))
    torch.testing.assert_close(channel(turned, "sobel_y").T, channel(texture, "sobel_x"))


def test_edges_and_their_inverse_and_the_distance_to_them():
    picture = flat(0.0, 256, 512)
    picture[..., 48:] = 1.0
    texture = generate_texture_array(picture, (8, 16), "full")
    edges, distance = channel(texture, "edges"), channel(texture, "edge_distance")
    assert edges[3, 1] > 0.05
    assert edges[3, 8] == 0
    torch.testing.assert_close(channel(texture, "inverted_edges"), 1 - edges)
    # columns away from column 1, over a quarter of the longer side (4 cells)
    assert distance[3, 1:6].tolist() == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=1e-5)
    assert bool((channel(generate_texture_array(flat(), (4, 4), "full"), "edge_distance") == 1).all())


def test_edge_distance_is_euclidean():
    picture = flat(1.0, 512, 512)
    picture[..., 8 * 32 + 8 : 8 * 32 + 24, 8 * 32 + 8 : 8 * 32 + 24] = 0.0
    distance = channel(generate_texture_array(picture, (16, 16), "full"), "edge_distance")
    assert distance[8, 8] == 0
    assert distance[8 + 2, 8 + 1] == pytest.approx(5**0.5 / 4, abs=1e-5)


def test_a_red_dot_on_green_lights_colour_opponency():
    ground = torch.tensor([0.1, 0.5, 0.1]).view(1, 3, 1, 1).expand(1, 3, 256, 256).clone()
    ground[:, :, 136:152, 136:152] = torch.tensor([0.9, 0.1, 0.1]).view(3, 1, 1)
    colour = channel(generate_texture_array(ground, (8, 8)), "saliency_color")
    assert colour.flatten().argmax() == 4 * 8 + 4
    assert colour[4, 4] > 4 * colour[0, 0]


def test_an_intensity_spot_lights_intensity_and_not_colour():
    picture = flat(0.3)
    picture[:, :, 136:152, 136:152] = 0.9
    texture = generate_texture_array(picture, (8, 8))
    assert channel(texture, "saliency_intensity").flatten().argmax() == 4 * 8 + 4
    assert channel(texture, "saliency_color").max() < 1e-3


@pytest.mark.parametrize("odd", [(3, 4), (0, 0), (6, 7)])
def test_the_odd_one_out_tops_saliency(odd):
    picture = discs((8, 8), lambda row, column: (200, 30, 30) if (row, column) == odd else (30, 140, 30))
    saliency = channel(generate_texture_array(picture, (8, 8), "full"), "saliency")
    assert divmod(saliency.flatten().argmax().item(), 8) == odd
    rarity = channel(generate_texture_array(picture, (8, 8)), "color_rarity")
    assert divmod(rarity.flatten().argmax().item(), 8) == odd


def test_rarity_does_not_fall_in_step_with_stripes():
    picture = flat(0.0, 1024, 1024)
    picture.view(1, 3, 1024, 32, 32)[:, :, :, ::2] = 1.0
    rarity = channel(generate_texture_array(picture, (32, 32)), "color_rarity")
    assert (rarity[0, 0] - rarity[0, 1]).abs() < 0.05


def test_the_odd_orientation_tops_its_saliency():
    image = Image.new("RGB", (256, 256), (128, 128, 128))
    pen = ImageDraw.Draw(image)
    for row in range(8):
        for column in range(8):
            x, y = column * 32 + 16, row * 32 + 16
            across = (row, column) == (5, 2)
            pen.line([x - 10 * across, y - 10 * (not across), x + 10 * across, y + 10 * (not across)], "white", 4)
    orientation = channel(generate_texture_array(tensor(image), (8, 8)), "saliency_orientation")
    assert divmod(orientation.flatten().argmax().item(), 8) == (5, 2)


def test_local_variance_is_that_of_the_pixels():
    picture = flat(0.5)
    picture[:, :, 64:96, 64:96] = noise(4, 32, 32)
    variance = channel(generate_texture_array(picture, (8, 8)), "local_variance")
    grey = 0.299 * picture[0, 0] + 0.587 * picture[0, 1] + 0.114 * picture[0, 2]
    assert variance[2, 2] == pytest.approx(2 * grey[64:96, 64:96].std(correction=0).item(), abs=1e-3)
    assert variance[0, 0] < 1e-3


def test_a_blurred_half_loses_high_pass_and_keeps_low_pass():
    picture = noise(5, 256, 256)
    blurred = F.avg_pool2d(F.pad(picture, (6, 6, 6, 6), mode="replicate"), 13, stride=1)
    picture[..., 128:] = blurred[..., 128:]
    texture = generate_texture_array(picture, (8, 8), "full")
    high, low = channel(texture, "high_pass"), channel(texture, "low_pass")
    assert high[:, 5:].max() < 0.25 * high[:, :3].min()
    assert (low[:, 6:].mean() - low[:, :2].mean()).abs() < 0.02


def test_small_text_lights_text_likelihood_more_than_a_gradient_or_one_edge():
    gradient = torch.linspace(0, 1, 256).expand(1, 3, 256, 256).clone()
    edge = flat(0.9)
    edge[..., 140:] = 0.1
    page = with_text(flat(1.0), "the quick\nbrown fox\njumps over", (100, 100), size=12)
    text = {
        name: channel(generate_texture_array(picture, (8, 8), "full"), "text")
        for name, picture in {"page": page, "gradient": gradient, "edge": edge}.items()
    }
    assert text["page"][3, 3] > 10 * text["gradient"].max()
    assert text["page"][3, 3] > 3 * text["edge"].max()
    assert text["page"][0, 0] == 0


def test_a_text_detector_is_used_only_when_passed_and_replaces_stroke_density():
    def detector(picture):
        found = torch.zeros(picture.shape[0], 2, 2)
        found[:, 1, 0] = 1
        return found

    texture = generate_texture_array(noise(0, 64, 64), (4, 4), "full", text_detector=detector)
    assert channel(texture, "text")[2:, :2].min() == 1
    assert channel(texture, "text")[:2].max() == 0
    assert channel(generate_texture_array(noise(0, 64, 64), (4, 4), "full"), "text")[:2].max() > 0
    with pytest.raises(ValueError, match="must return"):
        generate_texture_array(flat(), (4, 4), "full", text_detector=lambda picture: torch.zeros(2))


def test_clusters_are_memberships_largest_first():
    picture = flat(0.9)
    picture[..., :96, :] = 0.1
    picture[:, 0, 192:, 192:] = 0.0
    picture[:, 1, 192:, 192:] = 0.7
    texture = generate_texture_array(picture, (8, 8), "full")
    first, second, third = (channel(texture, f"cluster_{name}") for name in ("largest", "second", "third"))
    torch.testing.assert_close(first + second + third, torch.ones(8, 8))
    assert first[4, 0] > 0.9
    assert second[0, 0] > 0.9
    assert third[7, 7] > 0.9


def test_tiny_text_lights_the_detail_lost_channels_and_large_text_does_not():
    tiny = with_text(flat(1.0, 1024, 1024), "tiny words here", (40, 40), size=9)
    texture = generate_texture_array(tiny, (32, 32), "full")
    lost, octave = channel(texture, "detail_lost"), channel(texture, "detail_lost_octave")
    assert lost[1, 1] > 0.1
    assert octave[1, 1] > lost[1, 1]
    assert lost[20:, 20:].max() == 0
    large = with_text(flat(1.0, 1024, 1024), "AB", (0, 0), size=500)
    assert channel(generate_texture_array(large, (32, 32), "full"), "detail_lost").mean() < 0.05
    # a picture no larger than the gestalt loses nothing
    small = generate_texture_array(with_text(flat(1.0), "tiny words", (40, 40), size=9), (8, 8), "full")
    assert channel(small, "detail_lost").max() == 0


def test_detail_lost_follows_the_size_of_the_gestalt():
    picture = with_text(flat(1.0, 512, 512), "words of some size", (40, 40), size=20)
    lost = [
        channel(generate_texture_array(picture, (16, 16), "full", gestalt_tokens=tokens), "detail_lost").max().item()
        for tokens in (256, 64, 16)
    ]
    assert lost[0] == 0
    assert lost[0] < lost[1] < lost[2]
    # the scale is that of the pixels, whatever the grid
    coarse = channel(generate_texture_array(picture, (4, 4), "full", gestalt_tokens=16), "detail_lost")
    assert coarse.max() > 0.3 * lost[2]


def test_motion_and_memory_are_nothing_for_stills_and_something_for_streams():
    before, after = red_dot(256, place=(80, 80)), red_dot(256, place=(112, 80))
    still = generate_texture_array(after, (8, 8), "full")
    names = ("motion", "carried_relevance", "carried_age", "carried_trust", "motion_boost", "fixation_history")
    assert all(channel(still, name).max() == 0 for name in names)
    relevance = torch.zeros(1, 8, 8)
    relevance[0, 2, 2] = 1.0
    memory = PreviousFrame(before, relevance, age=torch.full((1, 8, 8), 2.0), fixations=torch.full((1, 8, 8), 0.25))
    moving = generate_texture_array(after, (8, 8), "full", previous=memory)
    motion = channel(moving, "motion")
    assert motion[2, 2] > 0.1
    assert motion[7, 7] == 0
    assert channel(moving, "carried_relevance")[2, 3] == 1  # relevance went along with the dot
    assert 0 < channel(moving, "carried_trust")[2, 3] < 1
    assert 0 < channel(moving, "carried_age")[0, 0] < 1
    assert channel(moving, "motion_boost")[2, 3] > channel(moving, "motion_boost")[7, 7]
    assert channel(moving, "fixation_history").unique().tolist() == [0.25]
    same = generate_texture_array(after, (8, 8), "full", previous=after)
    assert channel(same, "motion").max() < 1e-6


def test_semantic_channels_are_handed_through_with_their_gradient():
    semantic = torch.rand(1, 16, 4, 4, requires_grad=True)
    texture = generate_texture_array(noise(0, 64, 64), (4, 4), "full", semantic=semantic)
    assert torch.equal(texture[:, 17:33], semantic)
    texture.sum().backward()
    assert torch.equal(semantic.grad, torch.ones_like(semantic))
    silent = generate_texture_array(noise(0, 64, 64), (4, 4), "full")
    assert bool((silent[:, 17:33] == 0.5).all())


def test_pictures_carry_no_gradient():
    picture = noise(0, 64, 64).requires_grad_()
    assert not generate_texture_array(picture, (4, 4), "full").requires_grad


def test_works_in_and_out_of_inference_mode():
    picture = noise(0, 96, 96)
    with torch.inference_mode():
        inside = generate_texture_array(picture, (3, 3), "full")
    semantic = torch.rand(1, 16, 3, 3, requires_grad=True)
    outside = generate_texture_array(picture, (3, 3), "full", semantic=semantic)
    outside.square().sum().backward()
    torch.testing.assert_close(outside[:, :17], inside[:, :17])


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: generate_texture_array(flat(), (4, 4), "some"), ValueError, "one of core, full, got 'some'"),
        (lambda: generate_texture_array(flat() * 255, (4, 4)), ValueError, "divide 8-bit pictures by 255"),
        (lambda: generate_texture_array(-flat(), (4, 4)), ValueError, r"must lie in \[0, 1\], got values from -0.5"),
        (lambda: generate_texture_array(flat(float("nan")), (4, 4)), ValueError, "`image` contains NaN"),
        (lambda: generate_texture_array(flat(float("inf")), (4, 4)), ValueError, "NaN or infinity"),
        (lambda: generate_texture_array(flat().byte(), (4, 4)), TypeError, "got torch.uint8"),
        (lambda: generate_texture_array(flat()[0], (4, 4)), ValueError, r"\[B, 3, H, W\]"),
        (lambda: generate_texture_array(flat()[:, :1], (4, 4)), ValueError, r"got \(1, 1, 256, 256\)"),
        (lambda: generate_texture_array(flat()[..., :0], (4, 4)), ValueError, "no empty side"),
        (lambda: generate_texture_array([1], (4, 4)), TypeError, "got list"),
        (lambda: generate_texture_array(flat(), (0, 4)), ValueError, r"at least 1, got \(0, 4\)"),
        (lambda: generate_texture_array(flat(), (4, 4), "core", semantic=torch.rand(1, 16, 4, 4)), ValueError, "full"),
        (lambda: generate_texture_array(flat(), (4, 4), "full", semantic=torch.rand(1, 8, 4, 4)), ValueError, "16, 4"),
        (lambda: generate_texture_array(flat(), (4, 4), "full", previous=flat()[..., 1:]), ValueError, "`previous`"),
        (
            lambda: generate_texture_array(flat(), (4, 4), "core", previous=flat()),
            ValueError,
            "belong to channels='full'",
        ),
        (
            lambda: generate_texture_array(flat(), (4, 4), "full", previous=flat() * 9),
            ValueError,
            "`previous` must lie",
        ),
        (lambda: generate_texture_array(flat().double(), (4, 4)), TypeError, r"use `\.float\(\)`"),
        (
            lambda: generate_texture_array(flat(), (4, 4), "full", previous=PreviousFrame(flat(), torch.rand(1, 2, 2))),
            ValueError,
            r"`previous.relevance` must have shape \(1, 4, 4\)",
        ),
    ],
)
def test_bad_input_is_refused_with_the_fix(make, error, says):
    with pytest.raises(error, match=says):
        make()
