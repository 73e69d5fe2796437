"""The recipe of the embedded model: its tokenizer, its size, and a fast path that computes what the model does."""

import random

import numpy as np
import pytest
import torch
import transformers
import typer
from PIL import Image
from recipe import import_recipe

from arr_coc import ChatTokens, load_processor
from arr_coc.config import EMBEDDED_MODEL
from arr_coc.data.coco import Photo
from arr_coc.inference.load import load_model


@pytest.fixture(scope="module", name="recipe")
def open_recipe():
    return import_recipe("data", "looking", "muon", "parts", "placing", "train")


@pytest.fixture(scope="module", name="tokenizer")
def make_tokenizer(recipe):
    return recipe.parts.make_tokenizer()


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
    data = recipe.data
    from arr_coc.data.worlds import make_example

    for word in data.SEEN:
        tokens = tokenizer.tokenize(word)
        assert len(tokens) == len(word.split()), tokens  # "traffic light" has two
    kinds = [kind for part in data.COURSES["all"] for kind in part.kinds if kind[0] != "photos"]
    for world, kind in kinds:
        for seed in range(8):
            sample = make_example(world, seed, kind, None if world == "clips" else (512, 512))
            tokens = tokenizer.tokenize(sample.question)
            assert tokenizer.unk_token not in tokens
            assert sum(len(token) == 1 and token.islower() for token in tokens) <= 2, tokens  # a plural
            assert tokenizer.decode(tokenizer.encode(sample.answer, add_special_tokens=False)) == sample.answer


def test_the_processor_opens_from_a_directory_and_knows_its_chat(recipe, tmp_path):
    parts = recipe.parts
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


@pytest.fixture(scope="module", name="trainer")
def make_trainer(recipe):
    trainer = recipe.train.Trainer(None, 0, "cpu", False, tokens=64, course="first")
    assert sum(parameter.numel() for parameter in trainer.model.parameters()) <= 12e6
    return trainer


def draw_batch(recipe, trainer, kind, questions):
    """Pictures or clips of one size, and questions about each."""
    [part] = [part for part in recipe.data.COURSES["all"] if kind in part.kinds]
    rng = random.Random(0)
    grid, frames = (4, 5), min(6, part.frames(rng))
    scenes = [trainer.batcher.draw("train", seed, kind, grid, frames, rng, varied=False) for seed in range(3)]
    batch = trainer.batcher.put_together(scenes, [kind[1]] * 3, grid, rng, questions)
    return trainer.to_device(batch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [("scenes", "color"), ("clips", "clip_first")], ids=lambda kind: kind[0])
@torch.no_grad()
def test_the_fast_path_is_the_model_with_each_question_by_itself(recipe, trainer, tokenizer, kind):
    batch, model = draw_batch(recipe, trainer, kind, 4), trainer.model
    where = recipe.placing.place(batch["sizes"], batch["grid"], moved=False)
    pictures = trainer.resample(batch["pictures"], batch["sizes"], where, batch["grid"]).round()
    logits = model.lm_head(trainer.fast.read(batch, *trainer.fast.encode(pictures, batch["grid"])))
    processor, name = trainer.processor, "videos" if kind[0] == "clips" else "images"
    pad = "<|video_pad|>" if kind[0] == "clips" else "<|vision_start|><|image_pad|><|vision_end|>"
    checked = 0
    for row in range(3):
        frames = [Image.fromarray(frame.permute(1, 2, 0).byte().numpy()) for frame in pictures[row]]
        shown = {name: [frames if kind[0] == "clips" else frames[0]]}
        for turn in range(1, int(batch["turn"][row].max()) + 1):
            own = batch["turn"][row] == turn
            said = tokenizer.decode(batch["ids"][row][own])
            text = f"<|im_start|>user\n{pad}{said}"
            inputs = processor(text=[text], return_tensors="pt", **shown)
            assert inputs["input_ids"][0, : len(batch["opening"])].tolist() == batch["opening"].tolist()
            inputs["input_ids"] = torch.cat([batch["opening"], batch["ids"][row][own]])[None]
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            types = inputs["mm_token_type_ids"][:, : len(batch["opening"])]
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(types, (0, int(own.sum())))
            expected = model(**inputs).logits[0, -int(own.sum()) :]
            torch.testing.assert_close(logits[row][own], expected, atol=1e-4, rtol=1e-4)
            labels = batch["labels"][row][own]
            begin = int((labels != -100).nonzero()[0])
            assert labels[begin:-1].tolist() == batch["ids"][row][own][begin + 1 :].tolist()
            assert labels[-2] == tokenizer.eos_token_id
            checked += 1
    assert checked >= 5


def test_the_dense_loss_shares_nothing_with_the_words(recipe, trainer):
    """Its graph does not reach the word embeddings, which are the output layer too; that of the answers does."""
    batch = draw_batch(recipe, trainer, ("scenes", "color"), 2)
    answer, dense = trainer.losses(batch)
    table = trainer.model.get_input_embeddings().weight
    assert table is trainer.model.lm_head.weight
    encoder = trainer.model.model.visual.patch_embed.proj.weight
    [words, seen] = torch.autograd.grad(dense, [table, encoder], allow_unused=True, retain_graph=True)
    assert words is None
    assert seen.abs().sum() == 0  # the head begins at zero
    with torch.no_grad():
        trainer.head.weight.normal_(std=0.1)
    [words, seen] = torch.autograd.grad(trainer.losses(batch)[1], [table, encoder], allow_unused=True)
    assert words is None
    assert seen.abs().sum() > 0
    [words] = torch.autograd.grad(answer, [table])
    assert words.abs().sum() > 0


@pytest.mark.parametrize("moved", [False, True])
def test_seen_words_lie_under_their_tokens(recipe, trainer, moved):
    """Wherever the picture was moved, the colour of a shape is under the tokens that have its name."""
    torch.manual_seed(1)
    batch = draw_batch(recipe, trainer, ("scenes", "color"), 1)
    where = recipe.placing.place(batch["sizes"], batch["grid"], moved)
    seen = recipe.placing.words_under(batch, where, len(recipe.data.SEEN))
    assert seen.shape == (3, 20, len(recipe.data.SEEN))
    picture = torch.zeros(1, 1, 3, 120, 150, dtype=torch.uint8)
    picture[..., 40:60, 90:110] = 255
    batch = {
        "sizes": torch.tensor([[150.0, 120.0]]), "grid": (4, 5), "groups": 1, "images": 1,
        "boxes": torch.tensor([[90.0, 40.0, 110.0, 60.0]]), "owner": torch.tensor([0]), "word": torch.tensor([1]),
    }  # fmt: skip
    where = recipe.placing.place(batch["sizes"], batch["grid"], moved)
    seen = recipe.placing.words_under(batch, where, 2)[0]
    shown = trainer.resample(picture, batch["sizes"], where, batch["grid"])[0, 0, 0]
    bright = torch.nn.functional.avg_pool2d(shown[None], 32).flatten()
    assert not seen[:, 0].any()
    assert bright[seen[:, 1]].sum() >= 0.5 * bright.sum()
    assert bright[~seen[:, 1]].max() <= bright[seen[:, 1]].max()


def test_pictures_come_to_one_size_as_pillow_brings_them(recipe, trainer):
    batch = draw_batch(recipe, trainer, ("scenes", "read"), 1)
    sizes = torch.tensor([[140.0, 130.0], [160.0, 128.0], [133.0, 121.0]])
    pictures = torch.randint(0, 256, (3, 1, 3, 130, 160), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    where = recipe.placing.place(sizes, batch["grid"], moved=False)
    found = trainer.resample(pictures, sizes, where, batch["grid"])
    for row, (width, height) in enumerate(sizes.int().tolist()):
        whole = Image.fromarray(pictures[row, 0, :, :height, :width].permute(1, 2, 0).numpy())
        expected = np.asarray(whole.resize((160, 128), Image.Resampling.BICUBIC), dtype=np.float32)
        apart = np.abs(found[row, 0].permute(1, 2, 0).numpy() - expected)
        assert apart.mean() < 0.6  # Pillow rounds and clips after each side
        assert (apart > 8).mean() < 0.01
    moved = recipe.placing.place(sizes, batch["grid"], moved=True)
    assert (trainer.resample(pictures, sizes, moved, batch["grid"]) - found).abs().mean() > 10


def test_muon_of_stacked_matrices_is_torchs(recipe):
    generator = torch.Generator().manual_seed(0)
    shapes = ((32, 16), (16, 48), (32, 16), (16, 16))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(value.clone()) for value in drawn] for _ in range(2))
    optimizers = (
        recipe.muon.StackedMuon(ours, lr=0.01),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, before in zip(ours, theirs, drawn, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        assert (one - before).abs().max() > 1e-3


@pytest.mark.slow
def test_a_saved_model_opens_and_answers(recipe, tokenizer, tmp_path):
    from arr_coc import ARRCOCQwen
    from arr_coc.data.worlds import make_example
    from arr_coc.evaluation.answers import answer_examples, exact_match

    parts = recipe.parts
    processor = parts.make_processor()
    config = parts.make_config(tokenizer)
    model = transformers.Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(tmp_path, max_shard_size="11MB")
    processor.save_pretrained(tmp_path)
    files = [path.stat().st_size for path in tmp_path.iterdir()]
    assert max(files) < 12e6
    assert sum(files) <= 24e6
    vlm = ARRCOCQwen.from_pretrained(tmp_path)
    answer = vlm.answer(Image.new("RGB", (200, 200)), "what is it?", budget=0.25, max_new_tokens=3)
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
    looking = recipe.looking
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
    data = recipe.data
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


def test_what_is_known_is_not_measured_again(tmp_path):
    check, out = import_recipe("check").check, tmp_path / "figures.json"
    given = {"model": "embedded", "samples": 2, "pruned": 0}
    first = check.Check("embedded", "cpu", out, given)
    assert first.measure("exact", "color", first.ask, "scenes", "color", 2) == 1.0
    assert first.measure("pruned", "color, random, 0.06", first.ask, "scenes", "color", 2, "random", 0.06) < 1
    assert check.read_figures(out) == first.found
    again = check.Check("embedded", "cpu", out, given)
    assert again.measure("exact", "color", pytest.fail, "was measured again") == 1.0
    assert again.measure("exact", "read", len, "abc") == 3  # the control
    assert again.selectors == list(check.SELECTORS)
    assert "arr-coc" not in check.Check(EMBEDDED_MODEL, "cpu", None, given).selectors
    with pytest.raises(typer.BadParameter, match="give another --out"):
        check.Check("embedded", "cpu", out, given | {"samples": 3})
