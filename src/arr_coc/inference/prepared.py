"""`prepare` shortens a prompt by hand: arguments for the model, and what a caller may ask about them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor, nn

from arr_coc.config import Introspect, PromptBudget
from arr_coc.families.family import Family, Inputs, open_family
from arr_coc.gaze.plan import Gaze
from arr_coc.inference.load import check_editions
from arr_coc.inference.run import Run, TokenCount
from arr_coc.inference.session import Session
from arr_coc.prompting.cache import Holding
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.layout import read_prompt
from arr_coc.prompting.picture_cache import EncodingCache
from arr_coc.prompting.question import ChatTokens, choose_chat
from arr_coc.prompting.settings import Mode, OnError, Settings
from arr_coc.prompting.shortening import Kept
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.output import ARRCOCOutput
from arr_coc.selectors.registry import selector_name


class ModelReference:
    """Finds the model that a prompt was prepared for, without keeping it alive. A pickle of it finds none."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._find: Callable[[], nn.Module | None] = _no_model if model is None else weakref.ref(model)

    def open(self) -> Family:
        """The model's family."""
        model = self._find()
        if model is None:
            raise ValueError(
                "the model of this prompt is gone, or not in this process; prepare the prompt again with the model here"
            )
        return open_family(model)

    def __copy__(self) -> ModelReference:
        return self

    def __deepcopy__(self, memo: object) -> ModelReference:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelReference, ()


def _no_model() -> None:
    return None


class Prepared(dict[str, Any]):
    """The arguments of a shorter prompt, for `model(**prepared)` or `model.generate(**prepared)`; see [`prepare`].

    Args:
        arguments (`Mapping`): the arguments.
        run (`Run`, *optional*): how they came about.
        model (`nn.Module`, *optional*): the model they are for. It is not kept alive, and not pickled.

    Attributes:
        kept (`Sequence[tuple[Grid, ndarray]]`): for each picture, its grid and the cells whose tokens stayed.
        outputs (`list[ARRCOCOutput | None]`): the layer's output for each picture; None from other selectors.
        tokens (`TokenCount`): `full`, the visual tokens of the full prompt, and `used`, those of this one.
        failure (`str`, *optional*): the error, if the selection failed and all tokens were kept.
        holding (`Holding`, *optional*): how this prompt corresponds to the full one; None if it is the full one.

    Example:

    ```python
    >>> import torch
    >>> from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    >>> from arr_coc import create_selector, prepare
    >>> tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> vision, text = CLIPVisionConfig(image_size=56, patch_size=14, **tiny), LlamaConfig(vocab_size=64, **tiny)
    >>> config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=5)
    >>> model = LlavaForConditionalGeneration(config).eval()
    >>> inputs = {"input_ids": torch.tensor([[7] + [5] * 16 + [8, 9]]), "pixel_values": torch.rand(1, 3, 56, 56)}
    >>> prepared = prepare(model, inputs, create_selector("grid"), budget=4)
    >>> prepared["input_ids"].tolist(), prepared["position_ids"].tolist()
    ([[7, 5, 5, 5, 5, 8, 9]], [[0, 1, 3, 9, 11, 17, 18]])
    >>> prepared.tokens, prepared.failure
    (TokenCount(full=16, used=4), None)

    ```
    """

    def __init__(self, arguments: Mapping[str, Any], run: Run | None = None, model: nn.Module | None = None) -> None:
        super().__init__(arguments)
        run = run or Run({})
        self.kept: Kept = run.kept
        self.outputs: list[ARRCOCOutput | None] = run.outputs
        self.tokens = TokenCount(run.full, run.used)
        self.failure: str | None = run.failure
        self.holding: Holding | None = run.holding
        self._model = ModelReference(model)

    @property
    def labels(self) -> Tensor | None:
        """Labels `[B, L']` of the shorter prompt, -100 where it is padded; None without labels."""
        return self.get("labels")

    def family(self) -> Family:
        """The opened model that this prompt was prepared for; `ValueError` if it is gone."""
        return self._model.open()

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Move the arguments to a device, in place, as a processor's output does; `outputs` stay where they are."""
        device = torch.device(device)
        self.update({name: _move(value, device, non_blocking) for name, value in self.items()})
        if self.holding is not None:
            moved = {name: _move(value, device, non_blocking) for name, value in vars(self.holding).items()}
            self.holding = Holding(**moved)
        return self

    def step(self, cache: Any, ids: Tensor) -> dict[str, Any]:
        """Arguments that add tokens to a cache which begins with this prompt, to decode by hand.

        They state the true positions, so that prompts which were prepared in the meantime make no difference.

        Args:
            cache (`Cache`): filled by `model(**prepared, past_key_values=cache)` and perhaps earlier steps.
            ids (`Tensor` of shape `[B, n]`): the tokens to add.
        """
        if self.holding is None:
            raise ValueError(
                "this prompt was not shortened, and the model continues it by itself; for steps at true positions, "
                "pass it through collate_prepared([prepared])"
            )
        return self.holding.add(self.family(), cache, ids)


def _move(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """A copy of an argument with all its tensors on a device; encoded pictures are lists inside a `ModelOutput`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, list | tuple):
        return type(value)(_move(part, device, non_blocking) for part in value)
    if isinstance(value, Mapping):
        moved = {name: _move(part, device, non_blocking) for name, part in value.items()}
        return type(value)(**moved)
    return value


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
    encoded: Encodings | EncodingCache | None = None,
    introspect: Introspect | None = None,
) -> Prepared:
    """Shorten a prompt to the visual tokens that a selector keeps, as ordinary arguments for the model.

    Args:
        model (`nn.Module`): a supported model, with or without PEFT's LoRA around it.
        inputs (`Mapping`): the processor's output, with `labels` if there are any.
        selector (`TokenSelector` or `PictureSelector`): decides which visual tokens stay.
        mode (`str`, *optional*, defaults to `"prune"`): `"prune"` drops tokens; `"weight"` keeps all and scales their
            embeddings by relevance, which needs a selector that returns an [`ARRCOCOutput`]; `"saccade"` encodes the
            whole picture small, and full-resolution cells where they matter; `"auto"` chooses between `"prune"` and
            `"saccade"` by the size of the largest picture.
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
        encoded (`Encodings` or `EncodingCache`, *optional*): what was encoded of the same pictures, from [`encode`];
            what this question encodes is added to it. A cache finds the pictures by their content.
        introspect (`"auto"`, `"on"`, `"off"` or `int`, *optional*): whether the language model is asked where it looks
            before anything is chosen, see `docs/own-attention.md`: if less than a sixth of a picture's cells is read at
            full resolution and the model can be asked (`"auto"`), always, never, or always but only through so many of
            its layers. For ARR-COC layers, which say what they do without this, and for `own-attention`.

    Returns:
        `Prepared`: a `dict` for `model(**prepared)` or `model.generate(**prepared)`, which also says what was kept.
        Use it once: beam search changes its features in place. To decode by hand, use [`Prepared.step`]; the model's
        own count of positions is that of the last prompt prepared. LLaVA needs a cache to decode (no
        `use_cache=False`). A prompt without pictures is returned unchanged.

    Example:

    ```python
    >>> from arr_coc import create_selector, prepare
    >>> inputs = processor(images=image, text=prompt, return_tensors="pt")  # doctest: +SKIP
    >>> out = model.generate(**prepare(model, inputs, create_selector("grid"), budget=0.25))  # doctest: +SKIP

    ```
    """
    chat = choose_chat(chat, processor)
    settings = Settings(
        mode, budget, query, query_layers, chat, on_error, images, gaze, encoded=encoded, introspect=introspect
    )
    family = open_family(model)
    check_editions(selector, family.target)
    session = Session(family, selector, settings)
    if session.inside:
        name = selector_name(selector)
        raise ValueError(f"{name!r} acts inside the language model, so the prompt stays as it is; use `attach`")
    run = session.prepare(inputs)
    return Prepared(run.inputs, run, family.target)


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
    encodings.remember_source(family, inputs)
    return encodings
