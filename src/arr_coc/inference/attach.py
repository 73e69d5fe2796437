"""`with attach(model, selector):` makes the usual calls of a model select tokens, and restores the model afterwards."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from arr_coc.config import Grid, Introspect, PromptBudget
from arr_coc.families.family import open_family
from arr_coc.families.language_graph import forget_recordings
from arr_coc.gaze.loop import Looks
from arr_coc.gaze.plan import Gaze
from arr_coc.inference.arguments import check_ids, check_text, without_read_pictures
from arr_coc.inference.load import check_editions
from arr_coc.inference.run import Run
from arr_coc.inference.session import Session
from arr_coc.prompting.cache import calling, is_called
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.picture_cache import EncodingCache
from arr_coc.prompting.question import ChatTokens, Ints, choose_chat
from arr_coc.prompting.settings import Mode, OnError, Settings, usual_mode
from arr_coc.runtime.tensors import input_device
from arr_coc.runtime.tracing import untraced, untraced_itself
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.output import ARRCOCOutput

_METHODS = ("forward", "generate")
_ENTRY = "_call_impl"  # what `model(...)` calls, which calls `forward`
_STATE = "__getstate__"
NO_REPLICAS = (
    "nn.DataParallel copies a model without its selection; start one process per device instead, with `torchrun` or "
    "`accelerate launch`, or show one device in CUDA_VISIBLE_DEVICES"
)
# methods that would lead around the selection, and why they are refused
_REFUSED = {
    "init_continuous_batching": (
        "continuous batching (`generate_batch`, `init_continuous_batching`) takes ids alone, so that pictures would be "
        "lost; use `generate`, or remove the attachment"
    ),
    "_replicate_for_data_parallel": NO_REPLICAS,
}
_HANDLE = "_arr_coc_attachment"
_ABSENT: Any = object()


class Calls:
    """`forward` and `generate` with the model's signatures, which select visual tokens.

    Args:
        session (`Session`): selects them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.removed = False  # after that, whoever still holds one of the methods gets the model's own
        self.fallbacks = 0
        self._forget()

    def _forget(self) -> None:
        self._lock, self._of_thread = threading.Lock(), threading.local()
        self._latest = Run({})

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("session", "removed", "fallbacks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def last(self) -> Run:
        """What the last call of this thread selected; in a thread that made no call, the latest of all threads."""
        run: Run = getattr(self._of_thread, "run", self._latest)
        return run

    def count(self, run: Run) -> None:
        """Count a call if its selection failed."""
        if run.failure is not None:
            with self._lock:
                self.fallbacks += 1

    @untraced
    def record(self, run: Run) -> None:
        """Remember what a call selected; count it if its selection failed."""
        self.count(run)
        if run.kept:  # empty if this call only decoded another token, or was a further turn
            # without arguments and result: they would stay in memory as long as the thread
            self._of_thread.run = self._latest = Run({}, outputs=run.outputs, kept=run.kept, failure=run.failure)

    @untraced
    def record_text(self, arguments: dict[str, Any]) -> None:
        """Remember that a prompt without pictures kept none; a call that goes on from a cache begins no prompt."""
        cache = arguments.get("past_key_values")
        if cache is None or (isinstance(cache, Cache) and not cache.get_seq_length()):
            self._of_thread.run = self._latest = Run({})

    @untraced_itself
    def forward(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Like the model's own, which is `plain`; a call without pictures is passed on unchanged."""
        session, family = self.session, self.session.family
        if self.removed or is_called(family.target):  # by our own `generate`: the prompt is shorter already
            return plain(*args, **kwargs)
        arguments = _name_arguments(type(family.target).forward, args, kwargs)
        if not family.present(arguments) and not session.continues(arguments.get("past_key_values")):
            check_text(family, arguments)
            self.record_text(arguments)
            return plain(*args, **kwargs)
        check_ids(arguments)
        as_tuple = arguments.get("return_dict") is False
        if as_tuple:
            arguments["return_dict"] = True  # the session finds cache and logits by their names
        run = session.forward(arguments)
        self.record(run)
        return run.result.to_tuple() if as_tuple else run.result

    @untraced_itself
    def generate(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Like the model's own, which is `plain`: the result begins with the full prompt."""
        session, family = self.session, self.session.family
        if self.removed:
            return plain(*args, **kwargs)
        arguments = _name_arguments(type(family.target).generate, args, kwargs)
        if arguments.get("inputs") is not None:
            if arguments.get("input_ids") is not None:
                raise ValueError("`inputs` and `input_ids` are two names of the same; pass one of them")
            arguments["input_ids"] = arguments.pop("inputs")
        cache = arguments.get("past_key_values")
        session.check_cache(cache)
        if not session.continues(cache) and family.present(arguments):
            arguments = without_read_pictures(family, arguments)
            if not family.present(arguments):
                args, kwargs = (), arguments
        if not family.present(arguments) and not session.continues(cache):
            check_text(family, arguments)
            self.record_text(arguments)
            with calling(family.target):  # its passes have nothing to shorten either
                return plain(*args, **kwargs)
        check_ids(arguments)
        run = session.generate(arguments)
        self.record(run)
        return run.result


@untraced
def _name_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, for a function of the model's class: others may hide its signature."""
    if not args:
        return dict(kwargs)
    signature = inspect.signature(function)
    bound = dict(signature.bind_partial(None, *args, **kwargs).arguments)
    del bound[next(iter(signature.parameters))]  # self
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(parameter.name, {})
    return bound


class Replacement:
    """A method that replaces another and shows its signature, which `generate` and trainers inspect.

    A copy or a pickle of it is the method that it replaced: the copy of an attached model is not attached.

    Args:
        target (`nn.Module`): the model.
        name (`str`): of the method.
        calls (`Calls`): runs instead.
        plain (`Callable`, *optional*): runs if there is nothing to select; the replaced method by default.
    """

    def __init__(self, target: Any, name: str, calls: Calls, plain: Callable[..., Any] | None = None) -> None:
        # accelerate and others set methods on the model too
        before = without_removed(target.__dict__.get(name, _ABSENT))
        replaced = _own_method(target, name) if before is _ABSENT else before
        functools.update_wrapper(self, replaced)
        self.target, self.name, self.calls, self.before = target, name, calls, before
        self.plain: Callable[..., Any] = plain or replaced

    @untraced_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement; after it was removed, the method that it replaced."""
        if args and args[0] is self.target:  # accelerate binds methods that it unwraps, and this is bound already
            args = args[1:]
        return getattr(self.calls, self.name)(self.plain, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_own_method, (self.target, self.name)) if self.before is _ABSENT else (_as_it_is, (self.before,))


def without_removed(method: Any) -> Any:
    """What stands below replacements that were removed."""
    while isinstance(method, Replacement) and method.calls.removed:
        method = method.before
    return method


def _own_method(target: Any, name: str) -> Any:
    return getattr(type(target), name).__get__(target)


def _as_it_is(method: Any) -> Any:
    return method


class Attachment:
    """The handle that [`attach`] returns, also a context manager. `device` is where the model takes its inputs."""

    def __init__(self, model: nn.Module, selector: Selector, settings: Settings) -> None:
        if isinstance(vars(model).get("_calls"), Calls):
            raise ValueError("an ARRCOCQwen selects by itself; set its `selector`, or attach its `model`")
        family = open_family(model)
        self._target: Any = family.target
        if _HANDLE in self._target.__dict__:
            raise ValueError("this model is already attached; call `remove()` on the earlier handle or `detach(model)`")
        check_editions(selector, self._target)
        self.device = input_device(self._target)
        for part in (selector, getattr(selector, "beside", None)):
            if isinstance(part, nn.Module):
                part.to(self.device)
        self._methods = [name for name in _METHODS if hasattr(type(self._target), name)]
        generate = self._generate if "generate" in self._methods else None
        self._calls = Calls(Session(family, selector, settings, self._forward, generate))
        self._lock = threading.RLock()
        self._replacements = {name: self._replace(name) for name in self._methods}
        # what is called may be a wrapper, such as PEFT's
        entries, inner = dict.fromkeys([model, self._target]), family.inner
        for module in entries:
            module.__dict__[_ENTRY] = self._make_entry(module)
            for name in _REFUSED:
                module.__dict__[name] = functools.partial(self._refuse, module, name)
        self._guard: RemovableHandle | None = None
        if inner is not self._target:
            self._guard = inner.register_forward_pre_hook(self._check_inner, with_kwargs=True)
        self._modules: list[Any] = list(dict.fromkeys([*entries, inner]))
        for module in self._modules:
            module.__dict__[_STATE] = functools.partial(self._plain_state, module)
        self._target.__dict__[_HANDLE] = self

    def _replace(self, name: str) -> Replacement:
        """Put our method in place of the one that the model has now."""
        replacement = self._target.__dict__[name] = Replacement(self._target, name, self._calls)
        return replacement

    @untraced_itself
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._replacements["forward"].plain(*args, **kwargs)

    @untraced_itself
    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._replacements["generate"].plain(*args, **kwargs)

    def _make_entry(self, module: Any) -> Callable[..., Any]:
        """A function that leads from `model(...)` to `forward`, whoever has replaced that in the meantime.

        Not a method: `model.compile()` of torch 2.9 would take the function out of it and lose the module.
        """

        @untraced_itself
        def enter(*args: Any, **kwargs: Any) -> Any:
            self._renew()
            return type(module)._call_impl(module, *args, **kwargs)

        return enter

    @untraced
    def _renew(self) -> None:
        """Put our `forward` back on top if another tool has replaced it without calling it."""
        with self._lock:
            method = self._target.__dict__.get("forward")
            while method is not None and not (isinstance(method, Replacement) and not method.calls.removed):
                method = getattr(method, "__wrapped__", None)
            if method is None and not self._calls.removed:
                self._replacements["forward"] = self._replace("forward")

    def _refuse(self, module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """In place of a method that would lead around the selection; our own calls have nothing to select."""
        if is_called(self._target):
            return getattr(type(module), name)(module, *args, **kwargs)
        raise ValueError(_REFUSED[name])

    def _check_inner(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before the model without its head: nobody may lead full prompts around the selection."""
        headless = module is self._target
        if not headless and self._calls.session.family.present(kwargs) and not is_called(self._target):
            raise ValueError(
                "this call goes around the attached model's `forward`, so nothing would be selected; call the model "
                "itself, or attach again if another tool has replaced `forward`"
            )

    def _plain_state(self, module: Any) -> dict[str, Any]:
        """What `copy` and `pickle` take of a module: all but this attachment."""
        cls: Any = type(module)
        state: dict[str, Any] = {**cls.__getstate__(module)}
        for name in (_STATE, _ENTRY, _HANDLE, *_REFUSED):
            state.pop(name, None)
        for name in _METHODS:
            if isinstance(method := state.get(name), Replacement) and method.before is _ABSENT:
                del state[name]  # one that replaced another's becomes that by itself
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            guard = self._guard and self._guard.id
            state[name] = type(state[name])((key, hook) for key, hook in state[name].items() if key != guard)
        return state

    @property
    def output(self) -> list[ARRCOCOutput | None]:
        """The layer's output in this thread's last call, one per picture; None from other selectors."""
        return self._calls.last.outputs

    @property
    def kept(self) -> list[tuple[Grid, Ints]]:
        """For each picture of this thread's last call, its grid and the cells whose tokens stayed."""
        return list(self._calls.last.kept)

    @property
    def fallbacks(self) -> int:
        """In how many calls the selection failed, so that all tokens were kept."""
        return self._calls.fallbacks

    def remove(self) -> None:
        """Restore the model; calling it again does nothing. What other tools did to it in the meantime stays."""
        with self._lock:
            if self._calls.removed:
                return
            self._calls.removed = True
            _clean(self._target)
            for module in self._modules:
                for name in (_STATE, _ENTRY, _HANDLE, *_REFUSED):
                    module.__dict__.pop(name, None)
            if self._guard is not None:
                self._guard.remove()

    def __enter__(self) -> Self:
        if self._calls.removed:
            raise ValueError("this handle was removed; call `attach` again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _clean(target: Any) -> None:
    """Take removed replacements off a model."""
    for name in _METHODS:
        if isinstance(target.__dict__.get(name), Replacement):
            method = without_removed(target.__dict__.pop(name))
            if method is not _ABSENT:
                target.__dict__[name] = method


def detach(model: nn.Module) -> None:
    """Remove the attachment of a model whose handle was lost; a model without one stays as it is.

    On CUDA, this also gives back the memory of its language model's recordings, which otherwise serve the next
    attachment.

    Args:
        model (`nn.Module`): the model, with or without a wrapper around it.

    Example:

    ```python
    >>> from arr_coc import ARRCOCQwen, attach, create_selector, detach
    >>> model = ARRCOCQwen.from_pretrained().model
    >>> handle = attach(model, create_selector("grid"), budget=4)
    >>> detach(model)
    >>> detach(model)  # again: nothing to do
    >>> "forward" in vars(model)
    False

    ```
    """
    for module in model.modules():
        handle = module.__dict__.get(_HANDLE)
        if handle is not None:
            handle.remove()
        _clean(module)
        forget_recordings(module)


def attach(
    model: nn.Module,
    selector: Selector,
    *,
    mode: Mode | None = None,
    budget: PromptBudget | None = None,
    query_layers: int = 0,
    chat: ChatTokens | None = None,
    processor: Any = None,
    on_error: OnError = "full",
    gaze: Gaze | None = None,
    encoded: Encodings | EncodingCache | None = None,
    full_logits: bool = False,
    graphs: bool = True,
    introspect: Introspect | None = None,
    looks: Looks | None = None,
) -> Attachment:
    """Let `model(**inputs)` and `model.generate(**inputs)` select visual tokens, until `remove()` or the end of `with`.

    Other tools (trainers, accelerate, PEFT) may wrap or replace `forward` before or in the meantime: the model selects
    as long as it is attached, and not afterwards. `torch.compile` compiles the model, not the selection, so that
    `fullgraph=True` is impossible. Copies and pickles of the model are not attached.

    Args:
        model (`nn.Module`): a supported model, with or without PEFT's LoRA around it; only these two methods change.
        selector (`TokenSelector`, `PictureSelector` or `LanguageSelector`): decides which visual tokens stay. With one
            inside the language model (`fastv`), there are logits for the columns that stay, left-padded. A layer is
            moved to the model's device.
        mode (`str`, *optional*): as in [`prepare`]; by default `"auto"`, or `"prune"` if there is a budget. Saccades
            are cut from the processor's pixels.
        budget, query_layers, chat, processor, on_error, gaze, encoded, introspect: as in [`prepare`].
        full_logits (`bool`, *optional*, defaults to `False`): put `forward`'s logits at the columns of the full prompt,
            with zeros for padding and for pictures up to their last column, for losses and metrics that compare them
            with the full labels. The model's own loss does not need this. It takes as much memory as the full prompt's
            logits.
        graphs (`bool`, *optional*, defaults to `True`): on CUDA, replay passes of the language model, and in mode
            `saccade` of the encoder, as graphs where that gives the same result up to rounding; see
            `docs/performance.md`. The layer's own graphs give the same result to the bit and do not depend on this.
        looks (`Looks`, *optional*): `generate` looks again, with more to read each time, until the answer is sure; see
            `docs/looks.md`. By default it looks once, in mode `"auto"` up to two times.

    Example:

    ```python
    >>> import torch
    >>> from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    >>> from arr_coc import attach, create_selector
    >>> tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> vision, text = CLIPVisionConfig(image_size=56, patch_size=14, **tiny), LlamaConfig(vocab_size=64, **tiny)
    >>> config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=5)
    >>> model = LlavaForConditionalGeneration(config).eval()
    >>> inputs = {"input_ids": torch.tensor([[7] + [5] * 16 + [8, 9]]), "pixel_values": torch.rand(1, 3, 56, 56)}
    >>> with torch.no_grad(), attach(model, create_selector("grid"), budget=4):
    ...     model(**inputs).logits.shape
    torch.Size([1, 7, 64])

    ```
    """
    chat = choose_chat(chat, processor)
    usual: Any = usual_mode(mode, budget, selector)
    settings = Settings(
        usual,
        budget,
        None,
        query_layers,
        chat,
        on_error,
        None,
        gaze,
        encoded=encoded,
        full_logits=full_logits,
        graphs=graphs,
        introspect=introspect,
        looks=looks,
    )
    return Attachment(model, selector, settings)
