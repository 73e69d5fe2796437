"""A frozen model small enough to learn before: a real Qwen2-VL whose weights are set by hand.

Every cell of its pictures shows a thing of some shape and color; asked for a shape, it answers the mean color of what
it reads. So it is right if and only if the tokens it reads are those of the asked shape.
"""

from types import SimpleNamespace

import torch
from tiny_models import (
    CHAT_END,
    CHAT_START,
    FIRST_WORD,
    HIDDEN,
    IMAGE,
    NEWLINE,
    PAD,
    USER,
    VISION_END,
    VISION_START,
    tiny_model,
)

from arr_coc import ChatTokens
from arr_coc.training.answers import AnswerBatch

SIDE = 4  # cells
KINDS = 8  # shapes, and as many colors
COLORS, SHAPES = FIRST_WORD, FIRST_WORD + KINDS
CHAT = ChatTokens(CHAT_START, CHAT_END, (USER,), NEWLINE)
HALF = HIDDEN // 2
MARK = HALF - 1


def toy_base():
    model = tiny_model("qwen2_vl").requires_grad_(False)
    language = model.model.language_model
    table = torch.zeros_like(language.embed_tokens.weight)
    table[COLORS : COLORS + KINDS, :KINDS] = 8 * torch.eye(KINDS)
    table[SHAPES : SHAPES + KINDS, HALF : HALF + KINDS] = 8 * torch.eye(KINDS)
    language.embed_tokens.weight.copy_(table)
    model.lm_head.weight.copy_(0.25 * table * (torch.arange(len(table)) < SHAPES)[:, None])
    # markers give every token after them something of their own, as a context does: then a token's scale matters
    table[[CHAT_START, VISION_START, NEWLINE], MARK] = 8.0
    language.embed_tokens.weight.copy_(table)
    language.norm.weight.fill_(1.0)
    for layer in language.layers:
        layer.input_layernorm.weight.fill_(1.0)
        for weight in (*layer.self_attn.parameters(), *layer.mlp.parameters()):
            weight.zero_()  # every token looks at all before it alike
    _copy(language.layers[0].self_attn, slice(MARK, MARK + 1), 3.0)
    _copy(language.layers[1].self_attn, slice(0, KINDS), 40.0)  # colors, not shapes

    def see(pixel_values, grid, **lengths):
        codes = (pixel_values[::4, 0] * 1000).round().long()  # color and shape of each cell, in its first pixel
        return SimpleNamespace(pooler_output=table[COLORS + codes // KINDS] + table[SHAPES + codes % KINDS])

    model.model.get_image_features = see
    return model


def _copy(attention, part, gain):
    """Add the mean of these values of all tokens so far, through the first of the two heads that share each value."""
    attention.v_proj.weight[part, part] = torch.eye(part.stop - part.start)
    for head in (0, 1):
        values = range(head * HALF // 2, (head + 1) * HALF // 2)
        for value in values:
            if part.start <= value < part.stop:
                attention.o_proj.weight[value, head * HALF + value - values[0]] = gain


def toy_batch(count, seed):
    """Pictures of sixteen things, of which four stand out; each is asked for one shape that is there once."""
    chance = torch.Generator().manual_seed(seed)
    ids, labels, pixels = [], [], []
    for _ in range(count):
        shapes = torch.randint(1, KINDS, (SIDE**2,), generator=chance)
        place = int(torch.randint(SIDE**2, (1,), generator=chance))
        shapes[place] = 0
        shapes = (shapes + int(torch.randint(KINDS, (1,), generator=chance))) % KINDS
        colors = torch.randint(KINDS, (SIDE**2,), generator=chance)
        dark = torch.zeros(SIDE, SIDE)
        top, left = torch.randint(SIDE - 1, (2,), generator=chance).tolist()
        dark[top : top + 2, left : left + 2] = 1  # stands out, and has nothing to do with the question
        rows = dark.view(-1, 1).repeat_interleave(4, dim=0) + 0.1 * torch.randn(SIDE**2 * 4, 96, generator=chance)
        rows[::4, 0] = (colors * KINDS + shapes) / 1000
        pixels.append(rows)
        question = [CHAT_START, USER, NEWLINE, VISION_START, *[IMAGE] * SIDE**2, VISION_END]
        question += [SHAPES + int(shapes[place]), CHAT_END, CHAT_START]
        answer = COLORS + int(colors[place])
        ids.append([*question, answer])
        labels.append([-100] * len(question) + [answer])
    inputs = {
        "input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.tensor([[1, 2 * SIDE, 2 * SIDE]] * count),
    }  # fmt: skip
    inputs["attention_mask"] = (inputs["input_ids"] != PAD).long()
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    return AnswerBatch(inputs, torch.ones(count), 0, seed)
