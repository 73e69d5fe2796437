"""`ARRCOCQwen`: model, processor and selector in one object that answers questions about pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NoReturn, get_args, overload

import torch
from huggingface_hub import HfApi
from torch import nn

from arr_coc.config import EMBEDDED, EMBEDDED_MODEL, ARRCOCConfig, Introspect, PromptBudget
from arr_coc.families.family import open_family
from arr_coc.families.language_graph import PATIENCE
from arr_coc.gaze.loop import Looks, choose_mode
from arr_coc.gaze.plan import Gaze
from arr_coc.inference.answer import Answer, AnswerMode, make_answer
from arr_coc.inference.attach import NO_REPLICAS, Calls, Replacement
from arr_coc.inference.batches import answer_batches, raise_exceptions
from arr_coc.inference.conversation import Conversation, share_pixels
from arr_coc.inference.load import (
    ADAPTER,
    check_editions,
    find_base,
    has_adapter,
    load_adapter,
    load_model,
    load_processor,
    load_selector,
)
from arr_coc.inference.looking import can_gaze, settle
from arr_coc.inference.messages import (
    Asked,
    Message,
    PictureLike,
    check_messages,
    make_inputs,
    make_messages,
    put_stand_ins,
)
from arr_coc.inference.run import Run
from arr_coc.inference.session import Session
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.picture_cache import EncodingCache
from arr_coc.prompting.question import ChatTokens
from arr_coc.prompting.settings import Mode, OnError, Settings, usual_mode
from arr_coc.realizing import ARRCOCLayer
from arr_coc.runtime.stopwatch import Stopwatch
from arr_coc.runtime.tensors import input_device
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.output import ARRCOCOutput
from arr_coc.selectors.registry import selector_name
from arr_coc.selectors.rules import FullSelector

# What trainers, pipelines and users ask of a model. Not all its attributes: some of its methods would select nothing.
_BASE_NAMES = frozenset(
    (
        *("dtype", "name_or_path", "main_input_name", "input_modalities", "hf_device_map", "get_memory_footprint"),
        *("generation_config", "can_generate", "get_input_embeddings", "get_output_embeddings"),
        *("supports_gradient_checkpointing", "is_gradient_checkpointing", "gradient_checkpointing_enable"),
        *("gradient_checkpointing_disable", "enable_input_require_grads", "disable_input_require_grads"),
        *("is_quantized", "hf_quantizer", "quantization_method", "num_parameters", "floating_point_ops"),
        *("accepts_loss_kwargs", "warnings_issued"),
    )
)


class _Method:
    """A method that shows the base model's signature, which trainers and `generate` inspect."""

    def __init__(self, name: str, doc: str) -> None:
        def function(self: ARRCOCQwen, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            if labels is not None:
                kwargs["labels"] = labels
            return getattr(self, name)(*args, **kwargs)

        function.__name__, function.__doc__ = name, doc
        self.name, self.function, self.__doc__ = name, function, doc

    def __get__(self, vlm: ARRCOCQwen | None, owner: type[ARRCOCQwen]) -> Any:
        if vlm is None:  # the class, where trainers look for `labels`
            return self.function
        plain = vlm.model.__call__ if self.name == "forward" else vlm.model.generate
        return Replacement(vlm.model, self.name, vlm._calls, plain)


class ARRCOCQwen(nn.Module):
    """A frozen vision-language model that looks where the question points.

    `forward` and `generate` take the base model's arguments; `answer` takes pictures and a question.

    Args:
        model (`nn.Module`): a supported model.
        processor (`ProcessorMixin`): the model's processor.
        selector (`TokenSelector`, `PictureSelector` or `LanguageSelector`): decides which visual tokens stay.
        mode (`str`, *optional*): as in [`attach`].
        budget, query_layers, on_error, gaze, introspect: as in [`prepare`].
        graphs (`bool`, *optional*, defaults to `True`): as in [`attach`].
        looks (`Looks`, *optional*): as in [`attach`].

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
        mode: Mode | None = None,
        budget: PromptBudget | None = None,
        query_layers: int = 0,
        on_error: OnError = "full",
        gaze: Gaze | None = None,
        graphs: bool = True,
        introspect: Introspect | None = None,
        looks: Looks | None = None,
    ) -> None:
        super().__init__()
        family = open_family(model)
        if family.headless:
            raise ValueError("this model has no head, so it cannot answer; use `attach` or `prepare` for embeddings")
        chat = ChatTokens.from_tokenizer(processor.tokenizer)
        usual: Any = usual_mode(mode, budget, selector)
        settings = Settings(
            usual, budget, None, query_layers, chat, on_error, None, gaze, graphs=graphs, introspect=introspect,
            looks=looks,
        )  # fmt: skip
        self._named_mode = mode
        self.model = model
        self.processor = processor
        originals = model.__call__, model.generate
        self._calls = Calls(Session(family, selector, settings, *originals))
        self.selector = selector
        self.train(model.training)

    @property
    def selector(self) -> Selector:
        """Decides which visual tokens stay; may be replaced."""
        return self._calls.session.selector

    @selector.setter
    def selector(self, selector: Selector) -> None:
        check_editions(selector, self.model)
        session = self._calls.session
        session.selector = selector
        if self._named_mode is None:  # a selector may have a budget of its own
            usual: Any = usual_mode(None, session.settings.budget, selector)
            session.settings = replace(session.settings, mode=usual)
        self._modules["selector"] = selector if isinstance(selector, nn.Module) else None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "selector":  # use the property: torch would accept modules only
            object.__setattr__(self, name, value)
        elif name in _BASE_NAMES:
            setattr(self.model, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _BASE_NAMES:
            return getattr(self.model, name)
        return super().__getattr__(name)

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise ValueError(NO_REPLICAS)

    forward: Any = _Method("forward", "The base model's `forward` on the tokens that the selector keeps.")
    generate: Any = _Method(
        "generate", "The base model's `generate` on the tokens that the selector keeps; the result has the full prompt."
    )

    @property
    def config(self) -> Any:
        """The base model's configuration."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where the base model takes its inputs."""
        return input_device(self.model)

    @property
    def fallbacks(self) -> int:
        """In how many calls the selection failed, so that all tokens were kept."""
        return self._calls.fallbacks

    @classmethod
    def from_pretrained(
        cls,
        base: str | Path | None = None,
        selector: str | Path | Selector | None = None,
        *,
        mode: Mode | None = None,
        budget: PromptBudget | None = None,
        query_layers: int = 0,
        on_error: OnError = "full",
        gaze: Gaze | None = None,
        graphs: bool = True,
        introspect: Introspect | None = None,
        looks: Looks | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        attn_implementation: str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        token: str | bool | None = None,
        **model_kwargs: Any,
    ) -> ARRCOCQwen:
        """Load a model, its processor and a selector for inference; the model is frozen.

        Args:
            base (`str` or `Path`, *optional*): directory or Hub id of a supported model, or of a selector, to load the
                model it was trained for. The default, also called `"embedded"`, is the embedded model.
            selector (`str`, `Path` or selector, *optional*): a registered name, a directory, a Hub id, or a selector
                object. `"arr-coc"` is the one that was trained for the model, which the embedded model has;
                `"arr-coc-untrained"` is the layer before training, for any model. The default is the first for the
                embedded model and the second for others, with a warning in the log. A selector trained with LoRA
                also loads its adapter; one trained with the model's last layers also loads that model.
            mode (`str`, *optional*): as in [`attach`].
            budget, query_layers, on_error, gaze, introspect: as in [`prepare`].
            graphs (`bool`, *optional*, defaults to `True`): as in [`attach`].
            looks (`Looks`, *optional*): as in [`attach`].
            dtype, device_map, attn_implementation, revision: of the model, as in transformers; the embedded model is
                loaded in float32 unless a dtype is given.
            cache_dir, local_files_only, token: Hub options for the model, its processor and the selector.
            model_kwargs: further arguments for the model, such as `quantization_config`.
        """
        hub = {"cache_dir": cache_dir, "local_files_only": local_files_only, "token": token}
        base, selector = find_base(base, selector, **hub)
        if dtype == "auto" and str(base) in (EMBEDDED, EMBEDDED_MODEL):
            dtype = torch.float32  # it is small, and CPUs are slow in bf16
        base_hub = {**hub, "revision": revision}
        if device_map is not None:
            model_kwargs["device_map"] = device_map
        if attn_implementation is not None:
            model_kwargs["attn_implementation"] = attn_implementation
        processor = load_processor(base, **base_hub)
        model = load_model(base, dtype=dtype, **base_hub, **model_kwargs).requires_grad_(False)
        if has_adapter(selector, **hub):
            model = load_adapter(model, selector, **hub)  # type: ignore[arg-type]  # a name, not a selector
        loaded = load_selector(selector, model, **hub)
        return cls(
            model, processor, loaded, mode=mode, budget=budget, query_layers=query_layers, on_error=on_error,
            gaze=gaze, graphs=graphs, introspect=introspect, looks=looks,
        )  # fmt: skip

    def save_pretrained(self, directory: str | Path, *, save_base: bool = False) -> None:
        """Save what [`~ARRCOCQwen.from_pretrained`] needs to open this again: the selector, with its base's name.

        A LoRA adapter on the base is saved beside the selector. The base itself is not: it is opened by its name. After
        a `Trainer`, call this: its own `save_model` writes all weights in one file that only it can load.

        Args:
            directory (`str` or `Path`): created if missing.
            save_base (`bool`, *optional*, defaults to `False`): also save the base and its processor, in the folder
                `base`, which is then opened instead; for a base that was trained or has no name.
        """
        selector, adapted = self.selector, hasattr(self.model, "peft_config")
        if not isinstance(selector, ARRCOCLayer):
            name = selector_name(selector)
            raise ValueError(f"{name!r} has no weights to save; open it by name: from_pretrained(base, {name!r})")
        base = ARRCOCConfig.for_model(self.model)
        if not base.base_model_name_or_path and not save_base:
            raise ValueError("the base model was not opened by a name, so it must be saved too; pass save_base=True")
        if adapted and save_base:
            raise ValueError("the base has a LoRA adapter, which is saved by itself; merge it first, or drop save_base")
        directory = Path(directory)
        config, named = selector.config, selector.config.for_base(base)
        try:
            selector.config = named
            selector.save_pretrained(directory)
        finally:
            selector.config = config
        if adapted:
            self.model.save_pretrained(directory / ADAPTER)
        if save_base:
            self.model.save_pretrained(directory / "base")
            self.processor.save_pretrained(directory / "base")

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | bool | None = None) -> str:
        """Upload the selector and the adapter, if there is one, but not the base; returns the URL of the commit."""
        with TemporaryDirectory() as directory:
            self.save_pretrained(directory)
            api = HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            message = f"Upload {type(self).__name__} with arr-coc"
            return str(api.upload_folder(repo_id=repo_id, folder_path=directory, commit_message=message).commit_url)

    @property
    def output(self) -> list[ARRCOCOutput | None]:
        """The layer's output in this thread's last `forward` or `generate`, one per picture; None from others."""
        return self._calls.last.outputs

    @torch.no_grad()
    def answer(
        self,
        pictures: PictureLike | Message | Iterable[PictureLike | Message],
        question: str | None = None,
        *,
        budget: PromptBudget | None = None,
        mode: AnswerMode | None = None,
        gaze: Gaze | None = None,
        introspect: Introspect | None = None,
        looks: Looks | None = None,
        details: bool = False,
        encoded: Encodings | EncodingCache | None = None,
        streamer: Any = None,
        max_new_tokens: int = 128,
        do_sample: bool = False,
        **generation: Any,
    ) -> Answer:
        """Answer a question about one picture, several, a clip, or a conversation.

        A list of pictures is several pictures. A clip is `{"type": "video", "video": frames, "fps": 4}`, in place of a
        picture or as a part of a message: `frames` is a list of pictures of one size, or an array `[T, H, W, 3]` of
        bytes, `fps` how many come a second (2 if left out). All modes but `"saccade"` take clips.

        Args:
            pictures (a path, a `PIL.Image.Image`, an array `[H, W, 3]` of bytes, a clip, several of them, or messages):
                messages have transformers' format and may contain the question.
            question (`str`, *optional*): may be left out if the messages contain it.
            budget (`int`, `float`, `"auto"` or `dict`, *optional*): visual tokens per picture, or `{"total": 512}` for
                all pictures together; overrides the object's.
            mode (`str`, *optional*): `"full"` (the plain model), `"prune"`, `"weight"`, `"saccade"`, which looks at
                the pictures at their own resolution, or `"auto"`, which chooses among them by the size of the pictures
                and looks again until the answer is sure; overrides the object's. A call that names none, of an object
                that names none, is `"auto"`, or `"prune"` if there is a budget.
            gaze (`Gaze`, *optional*): for mode `"saccade"`; overrides the object's.
            introspect (`"auto"`, `"on"`, `"off"` or `int`, *optional*): as in [`prepare`]; overrides the object's.
            looks (`Looks`, *optional*): as in [`attach`]; overrides the object's.
            details (`bool`, *optional*, defaults to `False`): keep the layer's texture and the pull of each word.
            encoded (`Encodings` or `EncodingCache`, *optional*): what earlier questions about the same pictures
                encoded; see [`~ARRCOCQwen.look`]. A cache finds the pictures by their content.
            streamer (`BaseStreamer`, *optional*): receives the answer token by token.
            max_new_tokens, do_sample, generation: as in `generate`; one answer, greedy by default.
        """
        mode, settings = self._choose_settings(budget, mode, gaze, introspect, details, encoded, looks)
        options = {**_generation_options(max_new_tokens, do_sample, generation), "streamer": streamer}
        inputs, settings = self._make_prompt([make_messages(pictures, question)], settings)
        [answer] = self._generate(inputs, _settled(mode, settings), settings, options)
        return answer

    @overload
    def answer_many(
        self, questions: Iterable[Asked], *, return_exceptions: Literal[False] = False, **options: Any
    ) -> Iterator[Answer]: ...

    @overload
    def answer_many(
        self, questions: Iterable[Asked], *, return_exceptions: bool, **options: Any
    ) -> Iterator[Answer | Exception]: ...

    def answer_many(
        self,
        questions: Iterable[Asked],
        *,
        batch_size: int = 8,
        budget: PromptBudget | None = None,
        mode: AnswerMode | None = None,
        gaze: Gaze | None = None,
        introspect: Introspect | None = None,
        looks: Looks | None = None,
        details: bool = False,
        return_exceptions: bool = False,
        max_new_tokens: int = 128,
        do_sample: bool = False,
        **generation: Any,
    ) -> Iterator[Answer | Exception]:
        """Answer any number of questions in batches, in order, as they would be answered one by one.

        Pictures may have any sizes, and each question its own number of them. A batch takes one call of the vision
        encoder (in mode `"saccade"` one for the gestalts and one for the cells) and, for each look, one of the language
        model.
        Meanwhile a thread reads `questions` and opens the picture files of the next batch. If the selection fails for
        one question of a batch, each is asked alone, so that only this one keeps all tokens, or raises (see
        `on_error`).

        Memory: at most `2 * batch_size` questions have their pictures open, as `3 * height * width` bytes each. In mode
        `"saccade"` the statistics of each picture of a batch are on the device, 1.5 bytes a pixel (up to 6.5 if it has
        less than 4 megapixels), on CUDA also its 3 bytes a pixel (up to 67 megapixels), besides floats of one strip of
        one picture, at most `2**26` pixels. With 32 pictures of 12 megapixels that is 2.3 GB on the host, and 0.6 GB of
        statistics and 1.2 GB of bytes on the device. In the other modes the processor makes floats of all pictures of a
        batch, 24 bytes a pixel, after it has resized them to its own limits.

        Args:
            questions (`Iterable`): pairs `(pictures, question)`, with what [`~ARRCOCQwen.answer`] takes, or None for a
                question without a picture; or lists of messages, which contain their question. A generator or a
                `DataLoader` will do.
            batch_size (`int`, *optional*, defaults to 8): questions in a batch.
            budget, mode, gaze, introspect, looks, details: as in [`~ARRCOCQwen.answer`]. In mode `"auto"`, a batch is
                read in the mode that fits its largest picture.
            return_exceptions (`bool`, *optional*, defaults to `False`): give the exception in place of the answer if a
                question cannot be asked, as when its picture is damaged or `on_error` raises, and go on; otherwise it
                is raised after the answers before it.
            max_new_tokens, do_sample, generation: as in `generate`.

        Returns:
            `Iterator[Answer]`: one for each question. Their `outputs` are on the model's device; of a long list, keep
            what you need.

        Example:

        ```python
        >>> from importlib.resources import files
        >>> from arr_coc import ARRCOCQwen
        >>> vlm = ARRCOCQwen.from_pretrained()
        >>> examples = files("arr_coc") / "assets" / "examples"
        >>> asked = [
        ...     (examples / "camouflage.png", "what does the gray text say?"),
        ...     (examples / "page.png", "what is the total?"),
        ... ]
        >>> [answer.text for answer in vlm.answer_many(asked, budget=0.25)]
        ['LSNHZ', '$20.10']

        ```
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"`batch_size` must be a whole number of at least 1, got {batch_size!r}")
        if generation.get("streamer") is not None:
            raise ValueError("a streamer follows one answer; use `answer`")
        mode, settings = self._choose_settings(budget, mode, gaze, introspect, details, looks=looks)
        options = _generation_options(max_new_tokens, do_sample, generation)

        def make_prompt(conversations: Sequence[list[dict[str, Any]]]) -> tuple[dict[str, Any], Settings]:
            return self._make_prompt(conversations, settings)

        def generate(inputs: dict[str, Any], settings: Settings) -> list[Answer]:
            return self._generate(inputs, _settled(mode, settings), settings, options)

        answers = answer_batches(questions, batch_size, make_prompt, generate)
        return answers if return_exceptions else raise_exceptions(answers)

    def choose_mode(self, mode: str | None, budget: PromptBudget | None) -> str:
        """The mode of a call: what it names, otherwise the object's, otherwise what its budget suggests."""
        usual = self._calls.session.settings.budget
        return usual_mode(mode or self._named_mode, usual if budget is None else budget, self.selector)

    def look(
        self, pictures: PictureLike | Message | Iterable[PictureLike | Message], *, remember: bool = True
    ) -> Conversation:
        """Start a conversation about pictures or clips, which are then encoded once for all questions.

        Args:
            pictures (a path, a `PIL.Image.Image`, an array `[H, W, 3]` of bytes, a clip, or several of them): what it
                is about; a clip is given as in [`~ARRCOCQwen.answer`].
            remember (`bool`, *optional*, defaults to `True`): keep earlier questions and answers in the prompt.
        """
        return Conversation(self, pictures, remember)

    def warm_up(
        self, pictures: PictureLike | Message | Iterable[PictureLike | Message], question: str, **options: Any
    ) -> None:
        """On CUDA, record what questions like this one need, so that the first users do not wait for it.

        Recordings are made for steps of lengths: warm up with a short and a long question to cover what is between.

        Args:
            pictures (a path, a `PIL.Image.Image`, an array `[H, W, 3]` of bytes, a clip, or several): of the usual
                size.
            question (`str`): of the usual length.
            options: as in [`~ARRCOCQwen.answer`], such as `mode` and `budget`.
        """
        if self.device.type == "cuda":
            for _ in range(PATIENCE + 2):
                self.answer(pictures, question, **{"max_new_tokens": PATIENCE + 2, **options})

    @torch.no_grad()
    def inspect(
        self,
        pictures: PictureLike | Message | Iterable[PictureLike | Message],
        question: str | None = None,
        *,
        budget: PromptBudget | None = None,
        mode: AnswerMode | None = None,
        gaze: Gaze | None = None,
        introspect: Introspect | None = None,
        details: bool = True,
    ) -> Answer:
        """Choose tokens as [`~ARRCOCQwen.answer`] does in its first look, without answering: the text is empty.

        Args:
            pictures, question, budget, mode, gaze, introspect, details: as in [`~ARRCOCQwen.answer`].
        """
        mode, settings = self._choose_settings(budget, mode, gaze, introspect, details)
        inputs, settings = self._make_prompt([make_messages(pictures, question)], settings)
        mode = _settled(mode, settings)
        return self._make_answer(self._open_session(mode, settings).inspect(inputs, Stopwatch(self.device)), mode, "")

    def _choose_settings(
        self,
        budget: PromptBudget | None,
        mode: AnswerMode | None,
        gaze: Gaze | None,
        introspect: Introspect | None,
        details: bool,
        encoded: Encodings | EncodingCache | None = None,
        looks: Looks | None = None,
    ) -> tuple[AnswerMode, Settings]:
        """The mode and the settings of a call: what it names, otherwise the object's."""
        defaults = self._calls.session.settings
        named: Any = self.choose_mode(mode, budget)
        if named not in get_args(AnswerMode):
            raise ValueError(f"`mode` must be one of {', '.join(get_args(AnswerMode))}, got {named!r}")
        settings = replace(
            defaults,
            mode="prune" if named == "full" else named,
            budget=defaults.budget if budget is None else budget,
            gaze=gaze or (defaults.gaze if named in ("auto", "saccade") else None),
            looks=(looks or defaults.looks) if named in ("auto", "prune", "saccade") else looks,
            introspect=None if named == "full" else defaults.introspect if introspect is None else introspect,
            details=details,
            encoded=encoded,
        )
        return named, settings

    def _make_prompt(
        self, conversations: Sequence[list[dict[str, Any]]], settings: Settings
    ) -> tuple[dict[str, Any], Settings]:
        """The model's inputs for a batch, and the settings, which hold the original pictures in mode `saccade`."""
        settings = self._settle(conversations, settings)
        native = settings.mode == "saccade"
        for messages in conversations:
            check_messages(messages, self.processor, still=native)
        encoded = settings.encoded if isinstance(settings.encoded, Encodings) else None
        if native or (encoded is not None and encoded.pixels):
            conversations, originals = put_stand_ins(conversations)
            settings = replace(settings, images=originals if native else None)
        inputs = make_inputs(self.processor, conversations, self.device)
        family = self._calls.session.family
        if encoded is not None and not native and family.present(inputs):
            inputs = share_pixels(family, inputs, encoded)
        return inputs, settings

    def _settle(self, conversations: Sequence[Sequence[Message]], settings: Settings) -> Settings:
        """In mode `auto`, the settings of the mode that fits the largest picture."""
        if settings.mode != "auto":
            return settings
        parts = [part for messages in conversations for message in messages for part in message["content"]]
        return settle(settings, self.fit_mode("auto", parts), settings.looks or Looks(), self.selector)

    def fit_mode(self, mode: str, parts: Sequence[Message]) -> str:
        """The mode that fits the largest of opened pictures, parts of messages, if it is `"auto"`."""
        if mode != "auto":
            return mode
        family = self._calls.session.family
        sizes = [part["image"].size for part in parts if part.get("type") == "image"]
        gazing = can_gaze(family, self.selector)
        cell = family.cut()["patch_size"] * family.cut()["merge_size"] if gazing else 1
        cells = max((-(-width // cell) * -(-height // cell) for width, height in sizes), default=0)
        return choose_mode(cells, not any(part.get("type") == "video" for part in parts), gazing)[0]

    def _open_session(self, mode: AnswerMode, settings: Settings) -> Session:
        selector = FullSelector() if mode == "full" else self.selector
        return Session(self._calls.session.family, selector, settings, self.model.__call__, self.model.generate)

    def _generate(
        self, inputs: dict[str, Any], mode: AnswerMode, settings: Settings, options: dict[str, Any]
    ) -> list[Answer]:
        """One answer for each row of the inputs."""
        run = self._open_session(mode, settings).generate({**inputs, **options}, Stopwatch(self.device))
        texts = self.processor.batch_decode(run.generated, skip_special_tokens=True)
        rows = run.split(len(inputs["input_ids"]))
        return [self._make_answer(row, mode, text.strip()) for row, text in zip(rows, texts, strict=True)]

    def _make_answer(self, run: Run, mode: AnswerMode, text: str) -> Answer:
        self._calls.count(run)
        return make_answer(run, mode, text, self.processor.tokenizer)


def _settled(mode: AnswerMode, settings: Settings) -> AnswerMode:
    """The mode of a call, of which the settings say what `auto` has become."""
    return settings.mode if mode == "auto" else mode


def _generation_options(max_new_tokens: int, do_sample: bool, generation: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` that give one text for each question."""
    wrong = {"num_return_sequences", "return_dict_in_generate", "generation_config"} & set(generation)
    if wrong:
        raise ValueError(f"`answer` returns one text, so it takes no {sorted(wrong)[0]}; use `generate`")
    greedy = {} if do_sample else {"temperature": None, "top_p": None, "top_k": None}
    return {**greedy, "do_sample": do_sample, "max_new_tokens": max_new_tokens, **generation}
