"""Tiny random models of every family and prompts for them, built in code: no processor, no network.

Weights are large and biases random, so that a wrong token, place or level shows in the logits.
"""

import itertools

import torch
import transformers

PATCH, MERGE, HIDDEN, VOCAB = 4, 2, 64, 128
PAD, BOS, EOS, VISION_START, VISION_END, IMAGE, VIDEO = range(7)
CHAT_START, CHAT_END, USER, NEWLINE = 7, 8, 9, 10
FIRST_WORD = 16
QWEN = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
FAMILIES = [*QWEN, "llava"]
RELATIVES = ["qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
LLAVA_SIDE = 4  # tokens a side of LLaVA's square grid

IMAGE_PROMPT = [("text", 4), ("image", (1, 8, 12)), ("text", 6)]
TWO_IMAGES = [("text", 2), ("image", (1, 8, 12)), ("text", 3), ("image", (1, 12, 8)), ("text", 7)]
SMALL = [("text", 9), ("image", (1, 4, 8)), ("text", 3)]
TEXT = [("text", 12)]
CLIP = [("text", 3), ("video", (3, 8, 8)), ("text", 5)]
MIXED = [("text", 3), ("video", (2, 4, 8)), ("text", 2), ("image", (1, 8, 8)), ("text", 5)]


def _qwen_config(family):
    head = HIDDEN // 4
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [head // 2 - 2 * (head // 6)] + [head // 6] * 2,
    }
    text = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": PAD,
        "bos_token_id": BOS, "eos_token_id": EOS, "initializer_range": 0.15,
    }  # fmt: skip
    vision = {
        "depth": 4, "in_channels": 3, "patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": MERGE,
        "num_heads": 2, "initializer_range": 0.15,
    }  # fmt: skip
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2}
        cls = transformers.Qwen2VLConfig
    elif family == "qwen2_5_vl":
        vision |= {
            "hidden_size": 32, "out_hidden_size": HIDDEN, "intermediate_size": 64, "window_size": PATCH * MERGE * 4,
            "fullatt_block_indexes": [1, 3], "tokens_per_second": 2,
        }  # fmt: skip
        cls = transformers.Qwen2_5_VLConfig
    else:
        text["head_dim"] = head
        rope["mrope_interleaved"] = True
        vision |= {
            "hidden_size": 32, "out_hidden_size": HIDDEN, "intermediate_size": 64, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
        }  # fmt: skip
        cls = transformers.Qwen3VLConfig
    return cls(
        text_config=text | {"rope_parameters": rope}, vision_config=vision, tie_word_embeddings=False,
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
    )  # fmt: skip


def _relative_config(family):
    """More models that run on the same code as Qwen3-VL."""
    like = _qwen_config("qwen3_vl").to_dict()
    ids = {name: like[name] for name in like if name.endswith("token_id") and like[name] is not None}
    vision, text = dict(like["vision_config"]), dict(like["text_config"])
    del vision["model_type"], text["model_type"]
    if family == "qwen3_vl_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
        return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    del vision["deepstack_visual_indexes"]
    text |= {
        "num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {**text["rope_parameters"], "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    }  # fmt: skip
    if family == "qwen3_5_moe":
        del text["intermediate_size"]
        text |= {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        }  # fmt: skip
        return transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    return transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)


def _llava_config():
    side = LLAVA_SIDE * 14
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=side, patch_size=14
    )
    text = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, initializer_range=0.15,
    )  # fmt: skip
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, pad_token_id=PAD)


def tiny_model(family, attention="sdpa", seed=0):
    torch.manual_seed(seed)
    if family == "llava":
        config = _llava_config()
    else:
        config = _relative_config(family) if family in RELATIVES else _qwen_config(family)
    config._attn_implementation = attention
    name = {
        "qwen2_vl": "Qwen2VLForConditionalGeneration",
        "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
        "qwen3_vl": "Qwen3VLForConditionalGeneration",
        "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
        "llava": "LlavaForConditionalGeneration",
    }[family]
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    for attribute, value in (("pad_token_id", PAD), ("eos_token_id", EOS), ("bos_token_id", BOS)):
        setattr(model.generation_config, attribute, value)
    return model


def prompt_row(family, spec, seed=0):
    """One row: `spec` is a list of ("text", n), ("image", (t, h, w)) and ("video", (t, h, w)), grids in patches."""
    chance = torch.Generator().manual_seed(seed)
    row = {"ids": [], "types": [], "image": [], "video": []}

    def add(ids, kind=0):
        row["ids"] += ids
        row["types"] += [kind] * len(ids)

    def words(count):
        add(torch.randint(FIRST_WORD, VOCAB, (count,), generator=chance).tolist())

    for kind, size in spec:
        if kind == "text":
            words(size)
            continue
        t, h, w = size
        if family == "llava":
            row[kind].append((torch.rand(3, LLAVA_SIDE * 14, LLAVA_SIDE * 14, generator=chance), (1, 1, 1)))
            add([IMAGE] * LLAVA_SIDE**2, 1)
            continue
        pixels = (2 * torch.rand(t * h * w, 3 * 2 * PATCH * PATCH, generator=chance) - 1) * 0.9
        row[kind].append((pixels, size))
        token, number = (IMAGE, 1) if kind == "image" else (VIDEO, 2)
        frames = t if (kind == "video" and family == "qwen3_vl") else 1
        for _ in range(frames):  # Qwen3-VL: a run of tokens per frame, with a timestamp before it
            if frames > 1:
                words(3)
            add([VISION_START])
            add([token] * (t * h * w // MERGE**2 // frames), number)
            add([VISION_END])
    return row


def collate(family, rows):
    """What a processor would deliver for these rows, left-padded."""
    longest = max(len(row["ids"]) for row in rows)

    def pad(name, value):
        return torch.tensor([[value] * (longest - len(row["ids"])) + row[name] for row in rows])

    data = {"input_ids": pad("ids", PAD)}
    data["attention_mask"] = torch.tensor(
        [[0] * (longest - len(row["ids"])) + [1] * len(row["ids"]) for row in rows]
    )  # fmt: skip
    pictures = list(itertools.chain.from_iterable(row["image"] for row in rows))
    clips = list(itertools.chain.from_iterable(row["video"] for row in rows))
    if family == "llava":
        if pictures:
            data["pixel_values"] = torch.stack([pixels for pixels, _ in pictures])
        return data
    data["mm_token_type_ids"] = pad("types", 0)
    if pictures:
        data["pixel_values"] = torch.cat([pixels for pixels, _ in pictures])
        data["image_grid_thw"] = torch.tensor([size for _, size in pictures])
    if clips:
        data["pixel_values_videos"] = torch.cat([pixels for pixels, _ in clips])
        data["video_grid_thw"] = torch.tensor([size for _, size in clips])
        if family == "qwen2_5_vl":
            data["second_per_grid_ts"] = torch.tensor([0.5 * (place + 1) for place in range(len(clips))])
    return data


def inputs_for(family, *specs, seed=0):
    return collate(family, [prompt_row(family, spec, seed + place) for place, spec in enumerate(specs)])
