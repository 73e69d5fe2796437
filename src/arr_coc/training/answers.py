"""Stages 2 and 3: the loss of a frozen model's answer through `prepare`, gradients to the selector."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arr_coc.config import Budget, check_budget
from arr_coc.data.example import Example
from arr_coc.evaluation.samples import conversation
from arr_coc.families.family import open_family
from arr_coc.gaze.plan import Gaze
from arr_coc.prompting.prune import prepare_with_outputs
from arr_coc.prompting.question import ChatTokens
from arr_coc.prompting.settings import Settings
from arr_coc.realizing import ARRCOCLayer
from arr_coc.training.estimators import EstimatingSelector

# More tokens than any budget has.
MOST_SEEN = 2**20


class Asking(NamedTuple):
    """The batch of a step: ordinary inputs with labels, and what decides the draws."""

    inputs: dict[str, Any]
    weights: Tensor  # [B]
    step: int
    draw: int  # seed


@dataclass(frozen=True)
class BudgetPlan:
    """How many tokens are read as training goes on.

    Args:
        first, last (`float`): shares of the tokens at the beginning and at the end; the same is constant.
        sampled (`bool`, *optional*, defaults to `False`): draw a share between them for each step instead, so that
            one selector serves all budgets.

    Example:

    ```python
    >>> from arr_coc.training.answers import BudgetPlan
    >>> plan = BudgetPlan.parse("1.0>0.25")
    >>> plan.at(0, 100), plan.at(99, 100)
    (1.0, 0.25)

    ```
    """

    first: Budget
    last: Budget
    sampled: bool = False

    @classmethod
    def parse(cls, text: str) -> BudgetPlan:
        """`0.25` is constant, `1.0>0.25` falls, `0.06-0.5` is drawn for each step, `auto` is decided by relevance."""
        if text == "auto":
            return cls("auto", "auto")
        for mark in (">", "-"):
            parts = text.split(mark)
            if len(parts) == 2:
                first, last = (cls._share(part, text) for part in parts)
                return cls(first, last, mark == "-")
        share = cls._share(text, text)
        return cls(share, share)

    @staticmethod
    def _share(part: str, text: str) -> float:
        try:
            return float(check_budget(float(part)))
        except ValueError:
            raise ValueError(f"`budget` must be as 0.25, 1.0>0.25, 0.06-0.5 or auto, got {text!r}") from None

    def at(self, step: int, steps: int, seed: int = 0) -> Budget:
        """The budget of a step."""
        if isinstance(self.first, str) or isinstance(self.last, str):
            return "auto"
        share = random.Random(f"budget {seed} {step}").random() if self.sampled else step / max(1, steps - 1)
        return float(self.first * (self.last / self.first) ** share)  # by ratio: half of half is a quarter


class AnswersTask(nn.Module):
    """The layer before a frozen model.

    Args:
        layer (`ARRCOCLayer`): learns.
        base (`PreTrainedModel`): answers; only those of its weights learn that require a gradient.
        estimator (`str`): see `estimators`.
        chat (`ChatTokens`): markers of its prompts.
        budget (`BudgetPlan`): how many tokens are read.
        steps (`int`): of the whole run.
        seed (`int`): of the budgets.
        reward (`str`, *optional*, defaults to `"likelihood"`): of `reinforce`, or `"accuracy"`.
        thrift (`float`, *optional*, defaults to 0.0): how much the tokens that `"auto"` gives count in the loss.
        query_layers (`int`, *optional*, defaults to 0): as in [`~arr_coc.prepare`].
        mode (`str`, *optional*, defaults to `"prune"`): or `"saccade"`, for `gate`, `gumbel` and `none`.
        compress (`str`, *optional*): of the gestalt, see [`Gaze`]; a compressor that the layer has learns.
    """

    baseline: nn.Linear | None

    def __init__(
        self,
        layer: ARRCOCLayer,
        base: Any,
        estimator: str,
        chat: ChatTokens,
        budget: BudgetPlan,
        steps: int,
        seed: int = 0,
        reward: str = "likelihood",
        thrift: float = 0.0,
        query_layers: int = 0,
        mode: str = "prune",
        compress: Any = None,
    ) -> None:
        super().__init__()
        if compress is not None and mode != "saccade":
            raise ValueError(f"`compress` belongs to mode saccade, got mode {mode}")
        if mode not in ("prune", "saccade") or (mode == "saccade" and estimator in ("soft", "reinforce")):
            raise ValueError(f"`mode` must be prune, or saccade with gate, gumbel or none, got {mode} with {estimator}")
        if reward not in ("likelihood", "accuracy"):
            raise ValueError(f"`reward` must be likelihood or accuracy, got {reward!r}")
        self.layer = layer
        self.selector = EstimatingSelector(layer, estimator)
        self._base = (base,)  # not as a submodule: it is not saved with the run
        self.tuned = nn.ParameterList([weight for weight in base.parameters() if weight.requires_grad])
        self.family = open_family(base)
        self.estimator, self.reward, self.thrift = estimator, reward, thrift
        self.budget, self.steps, self.seed = budget, steps, seed
        how: Any = "weight" if estimator == "soft" else mode
        self.settings = Settings(mode=how, chat=chat, on_error="raise", query_layers=query_layers)
        if mode == "saccade":
            # where only a compressor learns, no saccade answers in its place
            alone = compress is not None and estimator == "none"
            self.settings = replace(self.settings, gaze=Gaze(compress=compress, gestalt=MOST_SEEN if alone else None))
        self.baseline = nn.Linear(2 * layer.config.hidden_size, 1) if estimator == "reinforce" else None
        if self.baseline is not None:
            nn.init.zeros_(self.baseline.weight)
            nn.init.zeros_(self.baseline.bias)

    def forward(self, batch: Asking) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses of a batch, and measures of how well it was answered."""
        budget = self.budget.at(batch.step, self.steps, self.seed)
        selector = self.selector
        # annealed: towards the end what is drawn is what is deployed
        selector.temperature = 2.0 * (0.1 ** (batch.step / max(1, self.steps)))
        selector.generator = torch.Generator().manual_seed(batch.draw)
        settings = replace(self.settings, budget=budget)
        prepared = prepare_with_outputs(self.family, batch.inputs, selector, settings)
        labels = prepared.inputs.pop("labels")
        detached = self.estimator == "reinforce" and not len(self.tuned)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
            # only where answers are: a large vocabulary at every token of a prompt would take gigabytes
            last = labels.shape[1] - int((labels != -100).any(dim=0).int().argmax()) + 1
            logits = self._base[0](**prepared.inputs, use_cache=False, logits_to_keep=last).logits
            loss, right = answer_losses(logits, labels[:, -last:])
        losses = {"answer": (loss * batch.weights).mean()}
        if self.baseline is not None:
            reward = -loss.detach() if self.reward == "likelihood" else right
            losses |= _reinforced(self.baseline(selector.seen)[:, 0], selector, reward, batch.weights)
        if self.thrift:
            total = selector.totals.to(loss.device)
            losses["thrift"] = self.thrift * (torch.stack(selector.expected) / total).clamp(max=1).mean()
        measures = {"accuracy": right.mean(), "tokens": torch.tensor(prepared.used / max(1, prepared.full))}
        return losses, {name: value.to(loss.device) for name, value in measures.items()}


def _reinforced(thought: Tensor, selector: EstimatingSelector, reward: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The chance of each draw, times how much better it went than the baseline had thought `[B]`."""
    better = reward - thought.detach()
    if len(better) > 1:  # what the baseline does not know yet is common to the batch
        better = (better - better.mean()) / better.std().clamp(min=0.1)
    chance = torch.stack(selector.log_chance)
    return {"reinforce": -(better * chance * weights).mean() / 10, "baseline": F.mse_loss(thought, reward)}


def answer_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy `[B]` of each answer, and whether `[B]` all of it was right (given what came before).

    Args:
        logits (`Tensor` of shape `[B, L, V]`), labels (`Tensor` of shape `[B, L]`): -100 where nothing is asked.
    """
    wanted = labels[:, 1:]
    asked = wanted != -100
    found = F.cross_entropy(logits[:, :-1].float().mT, wanted, ignore_index=-100, reduction="none")  # [B, L - 1]
    loss = found.sum(dim=1) / asked.sum(dim=1).clamp(min=1)
    right = ((logits[:, :-1].argmax(dim=-1) == wanted) | ~asked).all(dim=1)
    return loss, right.float()


def make_asking(processor: Any, examples: Sequence[Example], step: int, draw: int, device: Any) -> Asking:
    """Inputs of the questions with their answers, which alone are learned, up to the marker that ends them."""
    questions = [conversation(example.picture, example.question) for example in examples]
    answers = [{"role": "assistant", "content": [{"type": "text", "text": example.answer}]} for example in examples]
    whole = [[*question, answer] for question, answer in zip(questions, answers, strict=True)]
    inputs = processor.apply_chat_template(
        whole, tokenize=True, return_dict=True, processor_kwargs={"padding": True, "return_tensors": "pt"}
    )
    ids, end = inputs["input_ids"], ChatTokens.from_tokenizer(processor.tokenizer).end
    labels = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    for row in range(len(examples)):
        used = inputs["attention_mask"][row].nonzero()[:, 0]
        # as long as the whole is longer than the question alone, in a text where a picture is one token
        answer = _length(processor, whole[row], False) - _length(processor, questions[row], True)
        labels[row, : int(used[-1]) + 1 - answer] = -100
        ends = (ids[row] == end).nonzero()[:, 0]
        if len(ends):
            labels[row, int(ends[-1]) + 1 :] = -100
    moved = {name: value.to(device) for name, value in inputs.items()}
    weights = torch.tensor([example.weight for example in examples], device=device)
    return Asking({**moved, "labels": labels.to(device)}, weights, step, draw)


def _length(processor: Any, turns: list[dict[str, Any]], prompt: bool) -> int:
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    return len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
