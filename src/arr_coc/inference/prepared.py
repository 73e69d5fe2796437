"""`prepare` shortens a prompt by hand, as arguments for the model; `encode` encodes its pictures for many questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from arr_coc.config import PromptBudget
from arr_coc.families.family import Inputs, open_family
from arr_coc.gaze.plan import Gaze
from arr_coc.inference.session import Session
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.layout import read_prompt
from arr_coc.prompting.question import ChatTokens, choose_chat
from arr_coc.prompting.settings import Mode, OnError, Settings
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.registry import selector_name


def prepare(
    model: nn.Module,
    inputs: Inputs,
    selector: Selector,
    *,
    mode: Mode = "prune",
    budget: PromptBudget | None = None,
    query: Sequence[Tensor] | None = None,
    query_layers: int = 0,
    chat: ChatTokens | None = None,
    processor: Any = None,
    on_error: OnError = "full",
    images: Sequence[Image.Image | Tensor] | None = None,
    gaze: Gaze | None = None,
    encoded: Encodings | None = None,
) -> dict[str, Any]:
    """Shorten a prompt to the visual tokens that a selector keeps, as ordinary arguments for the model.

    Args:
        model (`nn.Module`): a supported model, with or without PEFT's LoRA around it.
        inputs (`Mapping`): the processor's output, with `labels` if there are any.
        selector (`TokenSelector` or `PictureSelector`): decides which visual tokens stay.
        mode (`str`, *optional*, defaults to `"prune"`): `"prune"` drops tokens; `"weight"` keeps all and scales their
            embeddings by relevance, which needs a selector that returns an [`ARRCOCOutput`]; `"saccade"` encodes the
            whole picture small, and full-resolution cells only where they matter.
        budget (`int`, `float`, `"auto"` or `dict`, *optional*): tokens of each picture; `{"total": 512}` is shared
            among all pictures of a row, in proportion to their tokens. Overrides the selector's default.
        query (`Sequence[Tensor]`, *optional*): token ids of each row's question, instead of finding it in the prompt.
        query_layers (`int`, *optional*, defaults to 0): run the question alone through this many layers of the
            language model, instead of using its word embeddings; this binds words as in "the *left* dog".
        chat (`ChatTokens`, *optional*): chat markers. By default those of `processor`; without one, Qwen's for models
            with its vocabulary, else those of the tokenizer beside the model's weights. A chat that is not understood
            is read as one turn, with a warning in the log.
        processor (`ProcessorMixin` or tokenizer, *optional*): the model's; its tokenizer knows the chat markers.
        on_error (`str` or `Callable`, *optional*, defaults to `"full"`): if the selection itself fails, `"full"` warns
            and keeps all tokens, `"raise"` raises. A function is called with the exception, and then all tokens are
            kept; what it raises is raised. Invalid arguments always raise.
        images (`Sequence[PIL.Image.Image | Tensor]`, *optional*): for `"saccade"`, the original pictures in the order
            of the prompt, RGB, or `[3, H, W]` of bytes. Cells are cut from them at their own resolution; the
            processor's pixels only hold their places. By default cells are cut from the processor's pixels.
        gaze (`Gaze`, *optional*): for `"saccade"`, how tokens are shared between gestalt and saccades.
        encoded (`Encodings`, *optional*): what was encoded of the same pictures, from [`encode`]; what this question
            encodes is added to it.

    Returns:
        `dict`: for `model(**kwargs)` or `model.generate(**kwargs)`. Use it once and before the next `prepare`: beam
        search changes its features in place, and the model itself stores the position at which decoding continues, as
        in its own `forward`. LLaVA needs a cache to decode (no `use_cache=False`). A prompt without pictures is
        returned unchanged.

    Example:

    ```python
    >>> from arr_coc import create_selector, prepare
    >>> inputs = processor(images=image, text=prompt, return_tensors="pt")  # doctest: +SKIP
    >>> out = model.generate(**prepare(model, inputs, create_selector("grid"), budget=0.25))  # doctest: +SKIP

    ```
    """
    chat = choose_chat(chat, processor)
    settings = Settings(mode, budget, query, query_layers, chat, on_error, images, gaze, encoded=encoded)
    session = Session(open_family(model), selector, settings)
    if session.inside:
        name = selector_name(selector)
        raise ValueError(f"{name!r} acts inside the language model, so the prompt stays as it is; use `attach`")
    return session.prepare(inputs).inputs


@torch.no_grad()
def encode(model: nn.Module, inputs: Inputs, selector: Selector | None = None) -> Encodings:
    """Encode the pictures of a prompt once, for any number of questions about them.

    Args:
        model (`nn.Module`): a supported model.
        inputs (`Mapping`): the processor's output.
        selector (`Selector`, *optional*): records the encoder layers that it reads.

    Returns:
        `Encodings`: for [`prepare`] and [`attach`], with prompts that have the same pictures in the same order.

    Example:

    ```python
    >>> import torch
    >>> from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    >>> from arr_coc import create_selector, encode, prepare
    >>> tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> vision, text = CLIPVisionConfig(image_size=56, patch_size=14, **tiny), LlamaConfig(vocab_size=64, **tiny)
    >>> config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=5)
    >>> model = LlavaForConditionalGeneration(config).eval()
    >>> inputs = {"input_ids": torch.tensor([[7] + [5] * 16 + [8, 9]]), "pixel_values": torch.rand(1, 3, 56, 56)}
    >>> seen = encode(model, inputs)
    >>> for question in ([8, 9], [10, 11, 12]):
    ...     asked = {**inputs, "input_ids": torch.tensor([[7] + [5] * 16 + question])}
    ...     short = prepare(model, asked, create_selector("grid"), budget=4, encoded=seen)
    >>> seen.calls
    1

    ```
    """
    family, encodings = open_family(model), Encodings()
    prompt = read_prompt(family, inputs)
    encodings.check([(span.kind, span.grid) for span in prompt.spans])
    for kind in family.present(inputs):
        encodings.full(family, inputs, kind, getattr(selector, "encoder_layers", ()))
    return encodings
