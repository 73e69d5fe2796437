"""The recipe of the embedded model: its tokenizer, its size, and a fast path that computes what the model does."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from arr_coc import ChatTokens, load_processor
from arr_coc.data.coco import Photo
from arr_coc.inference.load import load_model

RECIPE = Path(__file__).parents[2] / "recipes" / "embedded"


@pytest.fixture(scope="module", name="recipe")
def import_recipe():
    sys.path.insert(0, str(RECIPE))
    try:
        import data
        import fast
        import looking
        import parts
    finally:
        sys.path.remove(str(RECIPE))
    return parts, data, fast, looking


@pytest.fixture(scope="module", name="tokenizer")
def make_tokenizer(recipe):
    return recipe[0].make_tokenizer()


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("what color is the circle?", ["_what", "_color", "_is", "_the", "_circle", "?"]),
        ("How many crosses are there?", ["_how", "_many", "_cross", "e", "s", "_are", "_there", "?"]),
        ("STOP", ["S", "T", "O", "P"]),
        ("TOTAL 12.50", ["T", "O", "T", "A", "L", " ", "1", "2", ".", "5", "0"]),
        ("circle, star", ["_circle", ",", "_star"]),
    ],
)
def test_words_are_whole_and_capitals_are_characters(tokenizer, text, tokens):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [token.replace("_", "\u2581") for token in tokens]
    lowered = text[0].lower() + text[1:] if text[1].islower() else text
    assert tokenizer.decode(ids) == lowered


def test_any_text_can_be_asked(tokenizer):
    for text in ("unicornxyz", "naïve Straße 漢字 \u2603", "a\n\nb", "\t", "X" * 300, "?!<>"):
        assert isinstance(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)), str)
    assert tokenizer.unk_token_id not in tokenizer.encode("unicornxyz QWERTY 0123456789", add_special_tokens=False)


@pytest.mark.slow
def test_every_word_of_the_worlds_is_one_token(recipe, tokenizer):
    _, data, *_ = recipe
    from arr_coc.data.worlds import make_example

    for word in data.SEEN:
        tokens = tokenizer.tokenize(word)
        assert len(tokens) == len(word.split()), tokens  # "traffic light" has two
    kinds = [kind for part in data.COURSES["wide"] for kind in part.kinds if kind[0] != "photos"]
    for world, kind in kinds:
        for seed in range(8):
            sample = make_example(world, seed, kind, (512, 512))
            tokens = tokenizer.tokenize(sample.question)
            assert tokenizer.unk_token not in tokens
            assert sum(len(token) == 1 and token.islower() for token in tokens) <= 2, tokens  # a plural
            assert tokenizer.decode(tokenizer.encode(sample.answer, add_special_tokens=False)) == sample.answer


def test_the_processor_opens_from_a_directory_and_knows_its_chat(recipe, tmp_path):
    parts, *_ = recipe
    processor = parts.make_processor()
    processor.save_pretrained(tmp_path)
    parts.make_config(processor.tokenizer).save_pretrained(tmp_path)
    opened = load_processor(tmp_path)
    chat = ChatTokens.from_tokenizer(opened.tokenizer)
    assert opened.tokenizer.convert_ids_to_tokens([chat.start, chat.end, *chat.user, chat.newline]) == [
        *("<|im_start|>", "<|im_end|>", "\u2581user", "\n"),
    ]
    content = [{"type": "image", "image": Image.new("RGB", (200, 130))}, {"type": "text", "text": "what is this?"}]
    inputs = opened.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, add_generation_prompt=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    assert inputs["image_grid_thw"].tolist() == [[1, 8, 12]]


@pytest.mark.slow
@torch.no_grad()
def test_the_fast_path_is_the_model_with_each_question_by_itself(recipe, tokenizer):
    parts, data, fast, _ = recipe
    torch.manual_seed(0)
    config = parts.make_config(tokenizer)
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) <= 12e6
    batcher = data.Batcher(tokenizer, tokens=64)
    rng = random.Random(1)
    batch = batcher("train", 0, rng)
    batch = {name: value[:2] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    path = fast.FastPath(model, compiled=False)
    tokens, levels = path.encode(batch["pictures"], batch["grid"])
    hidden = path.read(torch.tensor(batcher.before), batch, tokens, levels)
    logits = model.lm_head(hidden)
    images = parts.make_processor().image_processor
    checked = 0
    for row in range(2):
        picture = images(images=[Image.fromarray(batch["pictures"][row].numpy())], return_tensors="pt")
        for turn in range(1, int(batch["turn"][row].max()) + 1):
            own = batch["turn"][row] == turn
            count = batch["grid"][0] * batch["grid"][1]
            ids = torch.cat([torch.tensor(batcher.before), torch.full((count,), batcher.image), batch["ids"][row][own]])
            types = (ids == batcher.image).int()[None]
            expected = model(input_ids=ids[None], mm_token_type_ids=types, **picture).logits[0, -int(own.sum()) :]
            torch.testing.assert_close(logits[row][own], expected, atol=1e-4, rtol=1e-4)
            labels = batch["labels"][row][own]
            begin = int((labels != -100).nonzero()[0])
            assert labels[begin:-1].tolist() == batch["ids"][row][own][begin + 1 :].tolist()
            assert labels[-2] == tokenizer.eos_token_id
            checked += 1
    assert checked >= 2


def test_seen_words_lie_under_their_tokens(recipe):
    _, data, *_ = recipe
    from arr_coc.data.worlds import draw_scene

    scene = draw_scene("scenes", 3, "color", (256, 192))
    seen = data.seen_words(scene, 6, 8)
    assert seen.shape == (48, len(data.SEEN))
    for thing in scene.things:
        x, y = (thing.box[0] + thing.box[2]) / 2, (thing.box[1] + thing.box[3]) / 2
        under = seen[int(y // 32) * 8 + int(x // 32)]
        assert all(under[data.PLACES[word]] for word in thing.words), thing
    blank = draw_scene("void", 3, "void_count", (256, 192))
    assert data.seen_words(blank, 6, 8).sum() == 0


@pytest.mark.slow
def test_a_saved_model_opens_and_answers(recipe, tokenizer, tmp_path):
    from arr_coc import ARRCOCQwen
    from arr_coc.data.worlds import make_example
    from arr_coc.evaluation.answers import answer_examples, exact_match

    parts, *_ = recipe
    processor = parts.make_processor()
    config = parts.make_config(tokenizer)
    model = transformers.Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(tmp_path, max_shard_size="11MB")
    processor.save_pretrained(tmp_path)
    files = [path.stat().st_size for path in tmp_path.iterdir()]
    assert max(files) < 12e6
    assert sum(files) <= 24e6
    answer = ARRCOCQwen.from_pretrained(tmp_path).answer(Image.new("RGB", (200, 200)), "what is it?", max_new_tokens=3)
    assert (answer.tokens.full, answer.tokens.used) == (36, 9)
    samples = [make_example("scenes", seed, "color") for seed in range(3)]
    opened = load_model(tmp_path, dtype=torch.float32)
    for selector in (None, "random", "oracle"):
        from arr_coc import create_selector

        chosen = None if selector is None else create_selector(selector)
        answers = answer_examples(opened, processor, samples, chosen, 0.25, batch_size=2, max_new_tokens=2)
        assert len(answers) == 3
    assert exact_match(samples, [sample.answer for sample in samples]) == 1.0
    assert exact_match(samples, ["no"] * 3) == 0.0


def test_where_things_are_is_measured_by_rank(recipe, tmp_path):
    looking = recipe[3]
    inside = np.array([True, True, False, False])
    assert looking.area_under_curve(np.array([3.0, 2.0, 1.0, 0.0]), inside) == 1
    assert looking.area_under_curve(np.array([0.0, 1.0, 2.0, 3.0]), inside) == 0
    assert looking.area_under_curve(np.array([1.0, 1.0, 1.0, 1.0]), inside) == 0.5
    assert looking.area_under_curve(np.array([2.0, 0.0, 1.0, 1.0]), inside) == 0.5
    assert looking.under_boxes([(0, 0, 10, 10)], (40, 20), (2, 4)).tolist() == [True] + [False] * 7
    assert looking.under_boxes([(38, 18, 39, 19)], (40, 20), (2, 4)).tolist() == [False] * 7 + [True]
    picture = Image.new("RGB", (256, 256), "white")
    picture.paste("red", (32, 32, 128, 128))
    picture.save(tmp_path / "a.png")
    photo = Photo(tmp_path / "a.png", (256, 256), (("red", (32.0, 32.0, 128.0, 128.0)),))
    model, processor = load_model("embedded", dtype=torch.float32), load_processor("embedded")
    assert looking.where_auc(model, processor, [photo], least=1)["red"] > 0.9
    assert looking.where_auc(model, processor, [photo], least=2) == {}


def test_part_of_a_photograph_keeps_its_boxes_true(recipe, tmp_path):
    """The red thing lies in its box, however the picture is cut or mirrored."""
    _, data, *_ = recipe
    picture = Image.new("RGB", (192, 192), "white")
    picture.paste("red", (20, 60, 70, 120))
    picture.save(tmp_path / "a.png")
    photo = Photo(tmp_path / "a.png", (192, 192), (("dog", (20.0, 60.0, 70.0, 120.0)),))
    kept = 0
    for seed in range(40):
        part, shown = data.augment(photo, random.Random(seed))
        red = np.asarray(shown)[:, :, 1] < 128
        assert shown.size == part.size
        if part.things:
            kept += 1
            left, top, right, bottom = map(round, part.things[0][1])
            assert red[top:bottom, left:right].all()
            assert red.sum() == (bottom - top) * (right - left)
        else:
            assert not red.any() or "dog" in part.crowds
    assert kept > 20
