"""Tokenizer, processor and configuration of the embedded model, made from code alone."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig

from arr_coc.inference.load import without_torchvision
from arr_coc.inference.processors.clips import Qwen3VLClips

HERE = Path(__file__).parent
MARKERS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
PUNCTUATION = "\n .,?!'\"-:;/()%$&#+*=<>@_"
TEMPLATE = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part %}<|video_pad|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""".strip()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words for lower-case words, single characters for capitals and digits.

    A word carries a mark before it (`_red`), wherever it stands, so that it has one embedding; spaces are not tokens
    but for those between capitals or digits. An unknown word falls into known parts, in the end into letters.
    """
    mark = "\u2581"
    words = (HERE / "words.txt").read_text(encoding="utf-8").split()
    entries = [*MARKERS, "<unk>", *PUNCTUATION, *string.digits, *string.ascii_uppercase, *string.ascii_lowercase, mark]
    entries += [mark + word for word in words]
    raw = Tokenizer(
        models.WordPiece(
            {entry: place for place, entry in enumerate(entries)},
            unk_token="<unk>",
            continuing_subword_prefix="",
            max_input_chars_per_word=100,
        )
    )
    lower = [normalizers.Replace(Regex(f"{letter}(?=[a-z])"), letter.lower()) for letter in string.ascii_uppercase]
    marked = normalizers.Replace(Regex("(?<![a-z])(?=[a-z])"), mark)
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), *lower, marked])
    piece = f"{mark}[a-z]+|[A-Z0-9]|(?<=[A-Z0-9]) (?=[A-Z0-9])|[^\\sa-zA-Z0-9{mark}]|\\n"
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(piece), behavior="removed", invert=True)
    raw.decoder = decoders.Sequence(
        [
            decoders.Fuse(),
            decoders.Replace(mark, " "),
            decoders.Replace(Regex("(?<=[a-z])(?=[A-Z0-9])"), " "),
            decoders.Replace(Regex("^ |(?<=\\n) "), ""),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    return tokenizer


def make_processor(longest: int = 512) -> Any:
    """The processor of Qwen3-VL around that tokenizer. It needs no torchvision.

    It reads at most as many pixels of a picture as a square of side `longest` has, and of a clip as many as 16 pictures
    of 256x256 have. Those of a clip of more than 60 are reduced to no less than about 128x128 pixels each.
    """
    cut = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = transformers.Qwen2VLImageProcessorPil(**cut, size={"shortest_edge": 128 * 128, "longest_edge": longest**2})
    clips = Qwen3VLClips(
        **cut, size={"shortest_edge": 128 * 128, "longest_edge": 16 * 256 * 256}, cap_pixels_per_frame=True
    )
    cls = without_torchvision(transformers.Qwen3VLProcessor)
    return cls(images, make_tokenizer(), clips, chat_template=TEMPLATE)


def save_processor(processor: Any, directory: Path) -> None:
    """Write the processor as transformers' own: `AutoProcessor` opens it where torchvision is installed."""
    processor.save_pretrained(directory)


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """A Qwen3-VL of less than 12 million parameters."""
    ids = dict(zip(MARKERS, tokenizer.convert_tokens_to_ids(list(MARKERS)), strict=True))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
    text = {
        "vocab_size": (len(tokenizer) + 15) // 16 * 16,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_parameters": rope,
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 6,
        "hidden_size": 256,
        "intermediate_size": 896,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 256,
        "num_position_embeddings": 32 * 32,
        "deepstack_visual_indexes": [2],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
