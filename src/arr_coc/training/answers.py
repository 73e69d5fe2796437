"""Stages `answers` and `hard`: the loss of a frozen model's own answer teaches the selector."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arr_coc.data.example import Example
from arr_coc.data.sources import open_answers, take_readable
from arr_coc.families.family import open_family
from arr_coc.gaze.compression import make_compressor
from arr_coc.gaze.plan import Gaze
from arr_coc.inference.load import ADAPTER, load_model, load_processor
from arr_coc.inference.messages import count_text, make_inputs, make_messages
from arr_coc.inference.session import Session
from arr_coc.prompting.question import ChatTokens
from arr_coc.prompting.settings import Settings
from arr_coc.realizing import ARRCOCLayer
from arr_coc.training.config import TrainConfig
from arr_coc.training.estimators import EstimatingSelector
from arr_coc.training.schedule import BudgetPlan
from arr_coc.training.stage import Stage, open_layer

# More tokens than any budget has.
MOST_SEEN = 2**20


class AnswerBatch(NamedTuple):
    """The batch of a step: ordinary inputs with labels, and what decides the draws."""

    inputs: dict[str, Any]
    weights: Tensor  # [B]
    step: int
    draw: int  # seed


class AnswersTask(nn.Module):
    """The layer before a frozen model.

    Args:
        layer (`ARRCOCLayer`): learns.
        base (`PreTrainedModel`): answers; only those of its weights learn that require a gradient.
        chat (`ChatTokens`): markers of its prompts.
        config (`TrainConfig`): how it learns.
    """

    baseline: nn.Linear | None

    def __init__(self, layer: ARRCOCLayer, base: Any, chat: ChatTokens | None, config: TrainConfig) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        self.selector = EstimatingSelector(layer, config.estimator)
        self._base = (base,)  # not as a submodule: it is not saved with the run
        self.tuned = nn.ParameterList([weight for weight in base.parameters() if weight.requires_grad])
        self.family = open_family(base)
        self.budget = BudgetPlan.parse(config.budget)
        mode: Any = "weight" if config.estimator == "soft" else config.mode
        self.settings = Settings(mode=mode, chat=chat, on_error="raise", query_layers=config.query_layers)
        if config.mode == "saccade":
            # where only a compressor learns, no saccade answers in its place
            alone = config.compress is not None and config.estimator == "none"
            compress: Any = config.compress
            gaze = Gaze(compress=compress, gestalt=MOST_SEEN if alone else None)
            self.settings = replace(self.settings, gaze=gaze)
        self.baseline = nn.Linear(2 * layer.config.hidden_size, 1) if config.estimator == "reinforce" else None
        if self.baseline is not None:
            nn.init.zeros_(self.baseline.weight)
            nn.init.zeros_(self.baseline.bias)

    def forward(self, batch: AnswerBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses of a batch, and measures of how well it was answered."""
        config = self.config
        budget = self.budget.at(batch.step, config.steps, config.seed)
        selector = self.selector
        # annealed: towards the end what is drawn is what is deployed
        selector.temperature = 2.0 * (0.1 ** (batch.step / max(1, config.steps)))
        selector.generator = torch.Generator().manual_seed(batch.draw)
        settings = replace(self.settings, budget=budget)
        run = Session(self.family, selector, settings).prepare(batch.inputs)
        detached = config.estimator == "reinforce" and not len(self.tuned)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
            loss, right = read_answers(self._base[0], run.inputs)
        losses = {"answer": (loss * batch.weights).mean()}
        if self.baseline is not None:
            reward = -loss.detach() if config.reward == "likelihood" else right
            losses |= _reinforced(self.baseline(selector.seen)[:, 0], selector, reward, batch.weights)
        if config.thrift:
            total = selector.totals.to(loss.device)
            losses["thrift"] = config.thrift * (torch.stack(selector.expected) / total).clamp(max=1).mean()
        measures = {"accuracy": right.mean(), "tokens": torch.tensor(run.used / max(1, run.full))}
        return losses, {name: value.to(loss.device) for name, value in measures.items()}


def _reinforced(thought: Tensor, selector: EstimatingSelector, reward: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The chance of each draw, times how much better it went than the baseline had thought `[B]`."""
    better = reward - thought.detach()
    if len(better) > 1:  # what the baseline does not know yet is common to the batch
        better = (better - better.mean()) / better.std().clamp(min=0.1)
    chance = torch.stack(selector.log_chance)
    return {"reinforce": -(better * chance * weights).mean() / 10, "baseline": F.mse_loss(thought, reward)}


def read_answers(base: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What [`answer_losses`] says of a model that reads a prompt with labels."""
    labels = inputs["labels"]
    # only where answers are: a large vocabulary at every token of a prompt would take gigabytes
    last = labels.shape[1] - int((labels != -100).any(dim=0).int().argmax()) + 1
    arguments = {name: value for name, value in inputs.items() if name != "labels"}
    logits = base(**arguments, use_cache=False, logits_to_keep=last).logits
    return answer_losses(logits, labels[:, -last:])


def answer_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy `[B]` of each answer, and whether `[B]` all of it was right (given what came before).

    Args:
        logits (`Tensor` of shape `[B, L, V]`), labels (`Tensor` of shape `[B, L]`): -100 where nothing is asked.
    """
    wanted = labels[:, 1:]
    asked = wanted != -100
    losses = F.cross_entropy(logits[:, :-1].float().mT, wanted, ignore_index=-100, reduction="none")  # [B, L - 1]
    loss = losses.sum(dim=1) / asked.sum(dim=1).clamp(min=1)
    right = ((logits[:, :-1].argmax(dim=-1) == wanted) | ~asked).all(dim=1)
    return loss, right.float()


def make_batch(processor: Any, examples: Sequence[Example], step: int, draw: int, device: Any) -> AnswerBatch:
    """Inputs of the questions with their answers, which alone are learned, up to the marker that ends them."""
    questions = [make_messages(example.picture, example.question) for example in examples]
    answers = [{"role": "assistant", "content": [{"type": "text", "text": example.answer}]} for example in examples]
    whole = [[*question, answer] for question, answer in zip(questions, answers, strict=True)]
    inputs = make_inputs(processor, whole, "cpu", answered=True)
    ids, end = inputs["input_ids"], ChatTokens.from_tokenizer(processor.tokenizer).end
    labels = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    for row in range(len(examples)):
        used = inputs["attention_mask"][row].nonzero()[:, 0]
        # as long as the whole is longer than the question alone, in a text where a picture is one token
        answer = count_text(processor, whole[row], answered=True)
        answer -= count_text(processor, questions[row], answered=False)
        labels[row, : int(used[-1]) + 1 - answer] = -100
        ends = (ids[row] == end).nonzero()[:, 0]
        if len(ends):
            labels[row, int(ends[-1]) + 1 :] = -100
    moved = {name: value.to(device) for name, value in inputs.items()}
    weights = torch.tensor([example.weight for example in examples], device=device)
    return AnswerBatch({**moved, "labels": labels.to(device)}, weights, step, draw)


def open_answers_stage(config: TrainConfig, accelerator: Any) -> Stage:
    """Open the base and the questions for stage `answers` or `hard`.

    Args:
        config (`TrainConfig`): of the run.
        accelerator (`accelerate.Accelerator`): on whose device, and over whose processes, it runs.

    Returns:
        [`~arr_coc.training.stage.Stage`]: it saves `adapter`, with LoRA, or `base`, with last layers.
    """
    sources = [open_answers(name, config.samples, config.seed, config.stage == "hard") for name in config.data]
    model: Any = load_model(config.base, dtype=getattr(torch, config.dtype)).requires_grad_(False)
    model = model.to(accelerator.device)
    processor = load_processor(config.base)
    layer = open_layer(model, config.start, config.introspect)
    if config.compress == "conv" and layer.compressor is None:
        levels = 1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ())
        layer.config = replace(layer.config, compressor_levels=levels)
        layer.compressor = make_compressor(layer.config)
    layer = layer.to(accelerator.device)
    if config.last_layers:
        _free_last_layers(model, config.last_layers)
    tuned = _add_lora(model, config.lora, config.seed, config.base) if config.lora else model
    task = AnswersTask(layer, tuned, ChatTokens.from_tokenizer(processor.tokenizer), config)
    size, process = config.batch_size * accelerator.num_processes, accelerator.process_index

    def batch_at(step: int) -> AnswerBatch:
        rng = random.Random(f"answers {config.seed} {step}")
        chosen = [rng.choice(sources) for _ in range(size)]
        numbers = [rng.randrange(len(source)) for source in chosen]
        mine = list(zip(chosen, numbers, strict=True))[process :: accelerator.num_processes]
        examples = [take_readable(source, number) for source, number in mine]
        return make_batch(processor, examples, step, rng.randrange(2**31) + process, accelerator.device)

    def save(directory: Path, finished: bool) -> None:
        if config.lora:
            tuned.save_pretrained(directory / ADAPTER, save_embedding_layers=False)  # which never learn
        if config.last_layers and finished:  # as large as the model: not with every checkpoint
            model.save_pretrained(directory / "base")
            processor.save_pretrained(directory / "base")

    return Stage(task, layer, batch_at, save)


def _free_last_layers(model: Any, count: int) -> None:
    """Let the last layers of the language model learn."""
    layers = open_family(model).inner.language_model.layers
    if count > len(layers):
        raise ValueError(f"`last_layers` must be at most {len(layers)} for this model, got {count}")
    layers[-count:].requires_grad_(True)


def _add_lora(model: Any, rank: int, seed: int, base: str) -> Any:
    """LoRA on queries and values of the language model."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("LoRA needs peft; install arr-coc[train]") from None
    torch.manual_seed(seed)
    targets = r".*language_model.*\.(q_proj|v_proj)"
    tuned = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    tuned.peft_config["default"].base_model_name_or_path = base  # its name, not where it lies on this machine
    return tuned
