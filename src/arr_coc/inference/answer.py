"""`ARRCOCQwen`: model, processor and selector in one object that answers questions about pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from arr_coc.config import EMBEDDED, EMBEDDED_MODEL, Budget, Grid
from arr_coc.families.family import open_family
from arr_coc.gaze.plan import Gaze
from arr_coc.inference.attach import Calls, Replacement
from arr_coc.inference.load import (
    find_base,
    has_adapter,
    load_adapter,
    load_model,
    load_processor,
    load_selector,
)
from arr_coc.inference.messages import Message, Shown, check_messages, make_inputs, make_messages, put_stand_ins
from arr_coc.inference.session import Run, Session
from arr_coc.prompting.question import ChatTokens
from arr_coc.prompting.settings import Mode, OnError, Settings
from arr_coc.runtime.stopwatch import Stopwatch
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.output import ARRCOCOutput
from arr_coc.selectors.rules import FullSelector

AnswerMode = Literal["full", "prune", "weight", "saccade"]
STAGES = ("encode", "select", "prefill", "decode")


@dataclass(frozen=True)
class TokenCount:
    """Visual tokens: of the full prompt, and those the language model read."""

    full: int
    used: int


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer and how it came about.

    Args:
        text (`str`): what the model said.
        outputs (`tuple[ARRCOCOutput | None, ...]`): what the selector saw, one per picture.
        kept (`tuple[tuple[Grid, ndarray], ...]`): for each picture its grid and the cells whose tokens were read.
        tokens (`TokenCount`): `full` and `used`; inside the language model, `used` counts those that go on.
        strategy (`str`): how tokens were chosen: `"relevance"`, `"grid"`, `"all"`, `"weight"`, or the selector's own.
        reason (`str`): why, in words.
        timings_ms (`dict[str, float]`): milliseconds by stage: encode, select, prefill, decode.
        words (`tuple[str, ...]`): the question's words as the model reads them.
        budget (`int`, `float` or `"auto"`, *optional*): the budget that was used; None where all tokens stay.
    """

    text: str
    outputs: tuple[ARRCOCOutput | None, ...]
    kept: tuple[tuple[Grid, NDArray[np.int64]], ...]
    tokens: TokenCount
    strategy: str
    reason: str
    timings_ms: dict[str, float]
    words: tuple[str, ...] = ()
    budget: Budget | None = None

    @property
    def output(self) -> ARRCOCOutput | None:
        """What the selector saw of the (first) picture; None if all tokens were read."""
        return self.outputs[0] if self.outputs else None

    def __str__(self) -> str:
        return self.text


class ARRCOCQwen(nn.Module):
    """A frozen vision-language model that looks where the question points.

    `forward` and `generate` take what the base model's do; `answer` is for people.

    Args:
        model (`nn.Module`): a supported model.
        processor (`ProcessorMixin`): its processor.
        selector (`TokenSelector`, `PictureSelector` or `LanguageSelector`): decides which visual tokens stay.
        mode, budget, query_layers, on_error, gaze: as in [`prepare`].

    Example:

    ```python
    >>> from arr_coc import ARRCOCQwen
    >>> from importlib.resources import files
    >>> vlm = ARRCOCQwen.from_pretrained()  # or "Qwen/Qwen3-VL-2B-Instruct"
    >>> picture = files("arr_coc") / "assets" / "examples" / "camouflage.png"
    >>> answer = vlm.answer(picture, "what does the gray text say?", budget=0.25)
    >>> answer.text, answer.tokens.used, answer.tokens.full
    ('LSNHZ', 35, 140)

    ```
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        selector: Selector,
        *,
        mode: Mode = "prune",
        budget: Budget | None = None,
        query_layers: int = 0,
        on_error: OnError = "full",
        gaze: Gaze | None = None,
    ) -> None:
        super().__init__()
        chat = ChatTokens.from_tokenizer(processor.tokenizer)
        settings = Settings(mode, budget, None, query_layers, chat, on_error, None, gaze)
        self.model = model
        self.processor = processor
        plain = model.__call__, model.generate
        self._calls = Calls(Session(open_family(model), selector, settings, *plain), *plain)
        self.selector = selector
        self.train(model.training)

    @property
    def selector(self) -> Selector:
        """What decides which visual tokens stay; may be set anew."""
        return self._calls.session.selector

    @selector.setter
    def selector(self, selector: Selector) -> None:
        self._calls.session.selector = selector
        self._modules["selector"] = selector if isinstance(selector, nn.Module) else None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "selector":  # by the property: torch would only take another module
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    # Under the base's own signatures, which trainers and `generate` read.
    @property
    def forward(self) -> Any:  # type: ignore[override]
        """As the base's, with tokens selected on the way."""
        return Replacement(self.model, "forward", self._calls.forward)

    @property
    def generate(self) -> Any:
        """As the base's, with tokens selected on the way and the full prompt in front."""
        return Replacement(self.model, "generate", self._calls.generate)

    @property
    def config(self) -> Any:
        """The base's configuration."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where the base begins."""
        device: torch.device = self.model.device
        return device

    @classmethod
    def from_pretrained(
        cls,
        base: str | Path | None = None,
        selector: str | Path | Selector | None = None,
        *,
        mode: Mode = "prune",
        budget: Budget | None = None,
        query_layers: int = 0,
        on_error: OnError = "full",
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        attn_implementation: str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        token: str | bool | None = None,
        **model_kwargs: Any,
    ) -> ARRCOCQwen:
        """Open a model, its processor and a selector, for inference: the base is frozen.

        Args:
            base (`str` or `Path`, *optional*): directory or Hub id of a supported model; of a selector, to open the
                base it records. By default, and as `"embedded"`, the embedded model.
            selector (`str`, `Path` or selector, *optional*): a registered name, a directory, a Hub id, or a selector
                itself. By default the one that comes with the embedded model; for others the untrained layer, which
                is said in the log. One that was trained with LoRA brings its matrices along, one that was trained
                with the base's last layers brings that base.
            mode, budget, query_layers, on_error: as in [`prepare`].
            dtype, device_map, attn_implementation, revision: of the base, as in transformers; the embedded model is
                opened in float32 unless a dtype is named.
            cache_dir, local_files_only, token: of the Hub, for all parts.
            model_kwargs: further arguments for the base, such as `quantization_config`.
        """
        hub = {"cache_dir": cache_dir, "local_files_only": local_files_only, "token": token}
        base, selector = find_base(base, selector, **hub)
        if dtype == "auto" and str(base) in (EMBEDDED, EMBEDDED_MODEL):
            dtype = torch.float32  # small enough, and CPUs are slow in bf16
        of_base = {**hub, "revision": revision}
        placed = {} if device_map is None else {"device_map": device_map}
        attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        processor = load_processor(base, **of_base)
        model = load_model(base, dtype=dtype, **placed, **attention, **of_base, **model_kwargs).requires_grad_(False)
        if has_adapter(selector, **hub):
            model = load_adapter(model, selector, **hub)  # type: ignore[arg-type]  # a name, not a selector
        opened = load_selector(selector, model, **hub)
        return cls(model, processor, opened, mode=mode, budget=budget, query_layers=query_layers, on_error=on_error)

    @property
    def output(self) -> list[ARRCOCOutput | None]:
        """What the selector saw in the last `forward` or `generate`, one per picture."""
        return self._calls.last.outputs

    @torch.no_grad()
    def answer(
        self,
        pictures: Shown | Message | Iterable[Shown | Message],
        question: str | None = None,
        *,
        budget: Budget | None = None,
        mode: AnswerMode | None = None,
        gaze: Gaze | None = None,
        details: bool = False,
        streamer: Any = None,
        max_new_tokens: int = 128,
        do_sample: bool = False,
        **generation: Any,
    ) -> Answer:
        """Answer a question about one picture, several, or a conversation.

        Args:
            pictures (a path, a `PIL.Image.Image`, an array `[H, W, 3]` of bytes, several of them, or messages):
                messages have transformers' form and may carry the question themselves.
            question (`str`, *optional*): what is asked.
            budget (`int`, `float` or `"auto"`, *optional*): visual tokens per picture; wins over the object's.
            mode (`str`, *optional*): `"full"` (the plain model), `"prune"`, `"weight"`, or `"saccade"`, which looks at
                the pictures at their own resolution; wins over the object's.
            gaze (`Gaze`, *optional*): of mode `"saccade"`; wins over the object's.
            details (`bool`, *optional*, defaults to `False`): keep what a layer saw: its texture, and the pull of each
                word.
            streamer (`BaseStreamer`, *optional*): gets the answer as it is written.
            max_new_tokens, do_sample, generation: as in `generate`; one answer, greedy by default.
        """
        refused = {"num_return_sequences", "return_dict_in_generate", "generation_config"} & set(generation)
        if refused:
            raise ValueError(f"`answer` gives one text, so it takes no {sorted(refused)[0]}; use `generate`")
        mode, session, inputs = self._open(pictures, question, budget, mode, gaze, details)
        greedy = {} if do_sample else {"temperature": None, "top_p": None, "top_k": None}
        options = {**greedy, "do_sample": do_sample, "max_new_tokens": max_new_tokens, "streamer": streamer}
        run = session.generate({**inputs, **options, **generation}, Stopwatch(self.device))
        text = "" if run.generated is None else self.processor.decode(run.generated[0], skip_special_tokens=True)
        return self._report(run, mode, text.strip())

    @torch.no_grad()
    def look(
        self,
        pictures: Shown | Message | Iterable[Shown | Message],
        question: str | None = None,
        *,
        budget: Budget | None = None,
        mode: AnswerMode | None = None,
        gaze: Gaze | None = None,
        details: bool = True,
    ) -> Answer:
        """What [`~ARRCOCQwen.answer`] would read, without an answer: its text is empty.

        Args:
            pictures, question, budget, mode, gaze, details: as in [`~ARRCOCQwen.answer`].
        """
        mode, session, inputs = self._open(pictures, question, budget, mode, gaze, details)
        return self._report(session.look(inputs, Stopwatch(self.device)), mode, "")

    def _open(
        self,
        pictures: Shown | Message | Iterable[Shown | Message],
        question: str | None,
        budget: Budget | None,
        mode: AnswerMode | None,
        gaze: Gaze | None,
        details: bool,
    ) -> tuple[AnswerMode, Session, dict[str, Any]]:
        """The mode, a session in it, and the inputs of a question."""
        own = self._calls.session
        mode = mode or own.settings.mode
        if mode not in get_args(AnswerMode):
            raise ValueError(f"`mode` must be one of {', '.join(get_args(AnswerMode))}, got {mode!r}")
        settings = replace(
            own.settings,
            mode="prune" if mode == "full" else mode,
            budget=own.settings.budget if budget is None else budget,
            gaze=gaze or (own.settings.gaze if mode == "saccade" else None),
            details=details,
        )
        messages = make_messages(pictures, question)
        check_messages(messages, self.processor)
        if mode == "saccade":
            messages, originals = put_stand_ins(messages)
            settings = replace(settings, images=originals)
        selector = FullSelector() if mode == "full" else self.selector
        session = Session(own.family, selector, settings, self.model.__call__, self.model.generate)
        return mode, session, make_inputs(self.processor, [messages], self.device)

    def _report(self, run: Run, mode: AnswerMode, text: str) -> Answer:
        strategy, reason = explain(run, mode)
        tokenizer = self.processor.tokenizer
        return Answer(
            text=text,
            outputs=tuple(run.outputs),
            kept=tuple(run.kept),
            tokens=TokenCount(run.full, run.used),
            strategy=strategy,
            reason=reason,
            timings_ms={name: round(run.milliseconds.get(name, 0.0), 3) for name in STAGES},
            words=tuple(tokenizer.decode([word]).strip() for ids in run.question[:1] for word in ids.tolist()),
            budget=None if mode == "full" else run.budget,
        )


def explain(run: Run, mode: str) -> tuple[str, str]:
    """How the tokens of an answer were chosen, and why, in words."""
    if run.failure is not None:
        return "all", f"selection failed: {run.failure}"
    if mode == "full" or not run.outputs:
        return "all", "mode is full" if run.outputs else "there is no picture"
    if mode == "weight":
        return "weight", f"all {run.full} tokens stay, scaled by their relevance"
    if mode == "saccade":
        return "saccade", _explain_gaze(run)
    if run.inside_layer is not None:
        kept = f"{run.used} of {run.full} tokens go on after layer {run.inside_layer} of the language model"
        return run.selector, kept
    outputs = [output for output in run.outputs if output is not None]
    if not outputs:
        return run.selector, "this selector gives no reasons"
    strategies = dict.fromkeys(output.strategy[0] for output in outputs)
    reasons = dict.fromkeys(output.reason[0] for output in outputs)
    return ", ".join(strategies), "; ".join(reasons)


def _explain_gaze(run: Run) -> str:
    """What was looked at, and why."""
    sharp = sum(len(cells) for _, cells in run.kept)
    if sharp == run.full:
        return f"the budget covers all {run.full} tokens"
    whole = f"the whole picture in {run.used - sharp} tokens, then {sharp} of {run.full} at full resolution"
    reasons = dict.fromkeys(output.reason[0].split(": ", 1)[-1] for output in run.outputs if output is not None)
    return "; ".join([whole, *reasons])
