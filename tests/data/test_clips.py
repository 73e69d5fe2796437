"""Clips: a seed gives one clip, and every answer follows from what the frames show."""

import re
from collections import Counter
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from recipe import WORDS

from arr_coc.data.worlds import draw_clip, draw_scene, list_worlds, make_example, open_world, split_seed
from arr_coc.data.worlds.tools.drawing import CHARACTERS, COLOURS, SHAPES
from arr_coc.data.worlds.world import Clip

pytestmark = pytest.mark.slow

KINDS = open_world("clips").kinds
SEEDS = 40


@cache
def clips(kind):
    """Clips of all numbers of frames and of several sizes."""
    sizes = ((128, 128), (192, 160), (128, 200), (256, 192))
    return [
        draw_clip(split_seed("validation", seed), kind, sizes[seed % 4], 4 + 2 * (seed % 7)) for seed in range(SEEDS)
    ]


def asked(kind):
    """Each clip of a kind with each of its questions of that kind."""
    return [(clip, question) for clip in clips(kind) for question in clip.questions if question.kind == kind]


def paths(frame_things):
    """(shape, color) -> its box in each frame, None where it is absent."""
    names = {thing.words: None for things in frame_things for thing in things if thing.words[0] in SHAPES}
    return {
        name: [next((thing.box for thing in things if thing.words == name), None) for things in frame_things]
        for name in names
    }


def way_of(boxes):
    """Which way boxes move: from their middles in the first and the last frame."""
    across, down = (
        (boxes[-1][axis] + boxes[-1][axis + 2] - boxes[0][axis] - boxes[0][axis + 2]) / 2 for axis in (0, 1)
    )
    if max(abs(across), abs(down)) < 1:
        return None
    return ("right" if across > 0 else "left") if abs(across) > abs(down) else ("down" if down > 0 else "up")


def signs(things):
    """The texts of the signs in a frame: the characters that follow each."""
    texts = []
    for thing in things:
        if thing.words[0] == "text":
            texts.append("")
        elif thing.words[0] in CHARACTERS:
            texts[-1] += thing.words[0]
    return texts


def named(text, words):
    """The one of some words that a question names."""
    [word] = [word for word in words if re.search(rf"\b{word}\b", text)]
    return word


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_one_clip_of_the_kind_asked_for(kind):
    for seed in range(4):
        sample, again = (make_example("clips", split_seed("train", seed), kind) for _ in range(2))
        frames = sample.open()
        assert all(np.array_equal(one, other) for one, other in zip(frames, again.open(), strict=True))
        assert (sample.question, sample.answer, sample.boxes) == (again.question, again.answer, again.boxes)
        assert (sample.kind, sample.id, len(frames) % 2) == (kind, f"clips#{split_seed('train', seed)}", 0)
        assert 4 <= len(frames) <= 16
        assert all(128 <= side <= 256 for side in frames[0].size)
        assert sample.boxes
        assert all(0 <= left < right <= 1 and 0 <= top < bottom <= 1 for left, top, right, bottom in sample.boxes)
        frames[0].paste("black", (0, 0, *frames[0].size))
        assert not np.array_equal(frames[0], sample.open()[0])
        with pytest.raises(ValueError, match="is a clip"):
            _ = sample.picture


@pytest.mark.parametrize("kind", KINDS)
def test_a_clip_has_the_frames_the_size_and_the_questions_asked_for(kind):
    for seed, clip in enumerate(clips(kind)):
        assert isinstance(clip, Clip)
        assert len(clip.frames) == len(clip.frame_things) == 4 + 2 * (seed % 7)
        assert {frame.size for frame in clip.frames} == {((128, 128), (192, 160), (128, 200), (256, 192))[seed % 4]}
        assert {frame.mode for frame in clip.frames} == {"RGB"}
        assert clip.picture is clip.frames[len(clip.frames) // 2]
        assert clip.things == clip.frame_things[len(clip.frames) // 2]
        assert clip.fps == 2.0
        texts = [question.text for question in clip.questions]
        assert len(texts) == len(set(texts)) <= 5
        assert any(question.kind == kind for question in clip.questions)
        for question in clip.questions:
            assert question.boxes
        width, height = clip.picture.size
        for left, top, right, bottom in (thing.box for things in clip.frame_things for thing in things):
            assert -1 <= left < right <= width + 1
            assert -1 <= top < bottom <= height + 1
    free = draw_scene("clips", 3, kind, (128, 128))
    same = draw_clip(3, kind, (128, 128), len(free.frames))
    assert all(np.array_equal(one, other) for one, other in zip(free.frames, same.frames, strict=True))
    assert free.questions == same.questions


@pytest.mark.parametrize("frames", [2, 5, 18])
def test_other_numbers_of_frames_are_refused(frames):
    with pytest.raises(ValueError, match=f"`frames` must be even and from 4 to 16, got {frames}"):
        draw_clip(0, None, None, frames)


def test_clips_are_listed_by_themselves():
    assert list_worlds(moving=True) == ["clips"]
    assert "clips" not in list_worlds()
    assert "scenes" in list_worlds()


def test_directions_are_those_of_the_boxes():
    for clip, question in asked("clip_direction"):
        moved = {name: way_of(boxes) for name, boxes in paths(clip.frame_things).items()}
        backwards = {name: way_of(boxes) for name, boxes in paths(clip.frame_things[::-1]).items()}
        names = {f"{color} {shape}": way for (shape, color), way in moved.items()}
        if question.answer in ("left", "right", "up", "down"):
            shape = named(question.text, SHAPES)
            [name] = [name for name in moved if name[0] == shape]
            assert moved[name] == question.answer
            assert backwards[name] not in (None, question.answer)
            boxes = paths(clip.frame_things)[name]
            axis = 0 if question.answer in ("left", "right") else 1
            travel = abs(boxes[-1][axis] - boxes[0][axis])
            assert travel >= clip.picture.size[axis] * (0.29 if len(boxes) < 8 else 0.19)
        elif "not" in question.text or "stays" in question.text:
            assert [name for name, way in names.items() if way is None] == [question.answer]
        else:
            way = named(question.text, ("left", "right", "up", "down"))
            assert [name for name, found in names.items() if found == way] == [question.answer]


def test_signs_appear_disappear_or_are_always_there():
    seen = Counter()
    for clip, question in asked("clip_appears"):
        shown = [set(signs(things)) for things in clip.frame_things]
        first, last, always = shown[0], shown[-1], set.intersection(*shown)
        role = next((role for role in ("disappears", "gone", "always") if role in question.text), "appears")
        seen[role] += 1
        wanted = {"appears": last - first, "disappears": first - last, "gone": first - last, "always": always}[role]
        assert wanted == {question.answer}
        assert sum(question.answer in texts for texts in shown) >= 2
        assert role == "always" or sum(question.answer not in texts for texts in shown) >= 2
        assert re.fullmatch("[A-Z0-9]{2,5}", question.answer)
    assert seen["appears"] > 10
    assert seen["disappears"] + seen["gone"] > 8
    heights = [
        thing.box[3] - thing.box[1]
        for clip in clips("clip_appears")
        for things in clip.frame_things
        for thing in things
    ]
    assert min(heights) >= 16


def test_first_and_last_are_those_of_the_frames():
    def arrivals(frame_things):
        return {
            f"{color} {shape}": next(number for number, box in enumerate(boxes) if box is not None)
            for (shape, color), boxes in paths(frame_things).items()
        }

    for clip, question in asked("clip_first"):
        came = arrivals(clip.frame_things)
        order = sorted(came, key=came.get)
        assert len(set(came.values())) == len(order) > 1
        assert set(arrivals(clip.frame_things[::-1]).values()) == {0}  # played backwards, nothing comes
        if "after" in question.text:
            before = " ".join(re.search(r"the (\w+) (\w+)\?", question.text).groups())
            assert order[order.index(before) + 1] == question.answer
        else:
            place = {"first": 0, "second": 1, "last": -1}[named(question.text, ("first", "second", "last"))]
            assert order[place] == question.answer
        for boxes in paths(clip.frame_things).values():
            here = [box is not None for box in boxes]
            assert here == sorted(here)  # what has come stays


def test_blinks_are_counted():
    counts = Counter()
    for clip, question in asked("clip_blink"):
        shape = named(question.text, SHAPES)
        [boxes] = [boxes for name, boxes in paths(clip.frame_things).items() if name[0] == shape]
        here = [box is not None for box in boxes]
        gone = sum(before and not after for before, after in pairwise(here))
        assert here[0]
        assert here[-1]
        assert str(gone) == question.answer
        counts[question.answer] += 1
    assert set(counts) == {"0", "1", "2", "3", "4"}
    assert max(counts.values()) < 0.45 * counts.total()


def test_what_is_there_shows_and_what_is_gone_does_not():
    """The boxes of a blinking shape have its colour in exactly those frames that have the thing."""
    for clip in clips("clip_blink"):
        pixels = [np.asarray(frame, dtype=float) for frame in clip.frames]
        for (shape, _), boxes in paths(clip.frame_things).items():
            left, top, right, bottom = (round(side) for side in next(box for box in boxes if box is not None))
            inside = [frame[top:bottom, left:right] for frame in pixels]
            if shape == "ring" or all(boxes):  # the middle of a ring shows the ground
                continue
            shown = [patch for patch, box in zip(inside, boxes, strict=True) if box is not None]
            hidden = [patch for patch, box in zip(inside, boxes, strict=True) if box is None]
            centre = (slice((bottom - top) // 2 - 2, (bottom - top) // 2 + 3),) * 2
            differences = [np.abs(one[centre].mean((0, 1)) - shown[0][centre].mean((0, 1))).max() for one in shown[1:]]
            assert max(differences) < 12
            assert all(np.abs(one[centre].mean((0, 1)) - shown[0][centre].mean((0, 1))).max() > 25 for one in hidden)


def test_what_is_asked_of_a_page_stands_in_two_frames():
    once = 0
    for clip, question in asked("clip_pan"):
        wanted = re.findall(r"[A-Z0-9]|[a-z]+", question.answer)
        frames = 0
        for things in clip.frame_things:
            read = "".join(thing.words[0] for thing in things if len(thing.words) == 1 and thing.words[0] != "text")
            frames += "".join(wanted) in read
        assert frames >= 2, question
        once += frames < len(clip.frames)
    assert once > 20  # the camera does leave what it has shown
    for clip in clips("clip_pan"):
        assert not np.array_equal(clip.frames[0], clip.frames[-1])


def test_scenes_are_cut_and_colors_are_those_of_their_scene():
    counts = Counter()
    for clip, question in asked("clip_cut"):
        ground = [np.median(np.asarray(frame).reshape(-1, 3), axis=0) for frame in clip.frames]
        cuts = [number for number, (one, other) in enumerate(pairwise(ground), 1) if np.abs(one - other).max() > 18]
        if question.answer.isdigit():
            assert int(question.answer) == len(cuts) + 1, (question, cuts)
            counts[question.answer] += 1
            continue
        shape = named(question.text, SHAPES)
        places = {"before": 0, "after": 1, "first": 0, "second": 1, "third": 2}
        place = places[named(question.text, places)]
        assert ("cut" in question.text) == (len(cuts) == 1)
        begin = [0, *cuts][place]
        [color] = [thing.words[1] for thing in clip.frame_things[begin] if thing.words[0] == shape]
        assert color == question.answer
    assert set(counts) == {"1", "2", "3"}
    assert max(counts.values()) < 0.7 * counts.total()
    both = [
        {question.answer for question in clip.questions if shape in question.text}
        for clip in clips("clip_cut")
        for shape in SHAPES
        if sum(shape in question.text for question in clip.questions) == 2
    ]
    assert sum(len(colors) == 2 for colors in both) >= 3  # so that one has to look on the right side of the cut


def test_no_direction_can_be_guessed():
    ways = Counter()
    for seed in range(150):
        clip = draw_clip(split_seed("train", seed), "clip_direction", (128, 160), 4)
        ways.update(q.answer for q in clip.questions if q.answer in ("left", "right", "up", "down"))
    assert len(ways) == 4
    assert max(ways.values()) < 0.35 * ways.total()


def test_every_word_is_a_word_of_the_embedded_model():
    said = {
        word
        for kind in KINDS
        for clip in clips(kind)
        for question in clip.questions
        for word in re.findall("[a-z]+", f"{question.text} {question.answer}")
    }
    assert {"blink", "appears", "cut", *SHAPES} <= said
    assert said <= WORDS | set(COLOURS), said - WORDS
