"""The model `arr_coc` for lmms-eval, which answers its tasks from the tokens that a selector keeps.

lmms-eval finds [`manifest`] through the entry point `lmms_eval.models`. The rest of the package does not import this
module. It can be imported without lmms-eval.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn

from arr_coc.config import Budget, check_budget
from arr_coc.inference.answer import Answer, AnswerMode
from arr_coc.inference.vlm import ARRCOCQwen

try:
    from lmms_eval.api.model import lmms as LMM  # type: ignore[import-not-found]
except ModuleNotFoundError:
    LMM = object

# lmms-eval's separator between examples, and its default end of an answer. Like its own Qwen models, we do not stop
# there: answers may have paragraphs.
BETWEEN_EXAMPLES = "\n\n"
SAMPLING = ("temperature", "top_p", "top_k")


def manifest() -> Any:
    """The entry point of lmms-eval: the name of the model and the path of its class."""
    from lmms_eval.models.registry_v2 import ModelManifest  # type: ignore[import-not-found]

    return ModelManifest(model_id="arr_coc", simple_class_path=f"{__name__}.{ARRCOCModel.__name__}")


class ARRCOCModel(LMM):  # type: ignore[misc]
    """An [`ARRCOCQwen`] for lmms-eval: one request at a time, the pictures first, then the text.

    A selection that fails ends the run, so that no score comes from tokens that were not selected.

    Args:
        pretrained, selector (`str`, *optional*): the model and its selector, as in [`ARRCOCQwen.from_pretrained`];
            by default the embedded model and its selector.
        budget (`int`, `float` or `"auto"`, *optional*): visual tokens per picture; by default the selector's own,
            or 529 in mode `"saccade"`.
        mode (`str`, *optional*, defaults to `"prune"`): as in [`ARRCOCQwen.answer`]; `"full"` is the plain model.
        device (`str`, *optional*): by default the GPU of this process, or the CPU if there is none.
        dtype (`str`, *optional*, defaults to `"auto"`): data type of the model.
        batch_size (`int`, *optional*, defaults to 1): lmms-eval always passes it; only 1 is accepted.
        max_new_tokens (`int`, *optional*, defaults to 128): for tasks that set no length themselves.
    """

    is_simple = True

    def __init__(
        self,
        pretrained: str | None = None,
        selector: str | None = None,
        budget: Budget | None = None,
        mode: AnswerMode = "prune",
        device: str | None = None,
        dtype: str = "auto",
        batch_size: int | str = 1,
        max_new_tokens: int = 128,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            known = "pretrained, selector, budget, mode, device, dtype, batch_size, max_new_tokens"
            raise ValueError(f"arr_coc has no argument {', '.join(unknown)}; it has {known}")
        if mode not in get_args(AnswerMode):
            raise ValueError(f"`mode` must be one of {', '.join(get_args(AnswerMode))}, got {mode!r}")
        if selector == "oracle":
            raise ValueError("oracle must be told where to look, which lmms-eval cannot do; use another selector")
        if str(batch_size) != "1":
            raise ValueError(f"`batch_size` must be 1, got {batch_size}: requests are answered one at a time")
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be a whole number of at least 1, got {max_new_tokens!r}")
        self._budget = None if budget is None else check_budget(budget)
        self._mode: AnswerMode = mode
        self._max_new_tokens = max_new_tokens
        self._device = find_device(device)
        self._rank, self._world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        # an attribute, because lmms-eval frees the memory of attributes that are modules
        self.vlm = ARRCOCQwen.from_pretrained(
            None if pretrained is None else str(pretrained),
            None if selector is None else str(selector),
            dtype=str(dtype),
            device_map=str(self._device),
            on_error="raise",
        )

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._device

    @property
    def batch_size(self) -> int:
        """Number of requests answered at a time."""
        return 1

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answer requests in their order; the progress bar shows how many visual tokens were read.

        Args:
            requests (`Sequence[Instance]`): each with `args`: the text, generation options, a function that takes the
                pictures out of a document, and the document's number, task and split.
        """
        texts = []
        used = full = 0
        columns = (*Progress.get_default_columns(), TextColumn("{task.fields[tokens]}"))
        with Progress(*columns, console=Console(stderr=True), disable=self.rank != 0) as bar:
            progress = bar.add_task("arr_coc", total=len(requests), tokens="")
            for request in requests:
                text, generation, pictures_of, number, task, split = request.args
                answer = self._answer(text, pictures_of(self.task_dict[task][split][number]), generation)
                texts.append(cut_at(answer.text, generation.get("until")))
                used, full = used + answer.tokens.used, full + answer.tokens.full
                bar.update(progress, advance=1, tokens=f"{used} of {full} visual tokens")
        return texts

    def _answer(self, text: str, pictures: Iterable[Any] | None, generation: Mapping[str, Any]) -> Answer:
        """Answer one request; it may have no picture."""
        images = [{"type": "image", "image": picture} for picture in pictures or ()]
        # placeholders of pictures in the text are removed, as lmms-eval's own Qwen models do
        question = {"type": "text", "text": text.replace("<image>", "").strip()}
        options = {"max_new_tokens": self._max_new_tokens, **generation_options(generation)}
        message = {"role": "user", "content": [*images, question]}
        return self.vlm.answer([message], budget=self._budget, mode=self._mode, **options)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Not supported: only answers are measured."""
        raise NotImplementedError("arr_coc gives no likelihoods; choose tasks whose output_type is generate_until")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Not supported: every request is asked once."""
        raise NotImplementedError("arr_coc answers in one round; choose tasks whose output_type is generate_until")


def find_device(device: str | None) -> torch.device:
    """The device of a name; with `"cuda"`, each of several processes gets its own GPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"`device` must be one of torch's, such as cpu, cuda or cuda:0, got {device!r}") from None
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`device` is {device}, but torch finds no GPU; use cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if device == "cuda" else parsed


def generation_options(generation: Mapping[str, Any]) -> dict[str, Any]:
    """A task's generation options in the form of `generate`: greedy unless the temperature is above 0.

    Args:
        generation (`Mapping`): `generation_kwargs` of the task; options that `generate` does not know are ignored.

    Example:

    ```python
    >>> from arr_coc.evaluation.lmms import generation_options
    >>> generation_options({"until": ["."], "max_new_tokens": 16, "temperature": 0.0, "top_p": 1.0, "num_beams": 1})
    {'do_sample': False, 'max_new_tokens': 16, 'num_beams': 1}

    ```
    """
    sampled = bool(generation.get("do_sample", True)) and (generation.get("temperature") or 0) > 0
    wanted = ("max_new_tokens", "num_beams", *(SAMPLING if sampled else ()))
    given = {name: generation[name] for name in wanted if generation.get(name) is not None}
    return {"do_sample": sampled, **given}


def cut_at(text: str, until: str | Iterable[str] | None) -> str:
    """Cut a text at the first of the strings that end it.

    Example:

    ```python
    >>> from arr_coc.evaluation.lmms import cut_at
    >>> cut_at("red. It is a star;", [";", "."])
    'red'

    ```
    """
    ends = [until] if isinstance(until, str) else list(until or ())
    for end in ends:
        if end and end != BETWEEN_EXAMPLES:
            text = text.split(end, 1)[0]
    return text
