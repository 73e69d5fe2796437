"""A tiny random model and its processor in a directory, as a checkpoint would be; made offline, without torchvision."""

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_models import MERGE, PATCH, VOCAB, _qwen_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from arr_coc.inference.load import without_torchvision
from arr_coc.pixels.patches import CLIP_MEAN, CLIP_STD, HALF

MARKERS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
]
CORPUS = ["system user assistant", "you are a helpful assistant.", "what color is the small dog on the left?"] * 4
TEMPLATE = """
{%- if messages[0].role != 'system' %}<|im_start|>system
you are a helpful assistant.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'text' %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""".strip()


def make_tokenizer():
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=MARKERS, show_progress=False, initial_alphabet=alphabet),
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )


def make_processor(family):
    name = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}[family]
    mean, std = (HALF, HALF) if family == "qwen3_vl" else (CLIP_MEAN, CLIP_STD)
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, image_mean=mean, image_std=std,
        size={"shortest_edge": 64, "longest_edge": 16384},
    )  # fmt: skip
    cls = without_torchvision(getattr(transformers, name))
    return cls(image_processor=images, tokenizer=make_tokenizer(), chat_template=TEMPLATE)


def write_checkpoint(directory, family="qwen3_vl", seed=0):
    """Save a model and its processor; returns the processor."""
    processor = make_processor(family)
    config = _qwen_config(family)
    tokenizer = processor.tokenizer
    config.text_config.vocab_size = max(len(tokenizer), VOCAB)
    named = dict(zip(("vision_start", "vision_end", "image", "video"), MARKERS[3:], strict=True))
    for name, token in named.items():
        setattr(config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return processor


def photo(width, height, seed=0):
    smooth = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(smooth).resize((width, height), Image.Resampling.BICUBIC)


def processed(processor, images, text="what color is it?"):
    content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": text}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
