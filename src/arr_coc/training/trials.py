"""Stage `trials`: how many tokens a question needs, and of which kind, from answers and a price.

First each question is answered several times, as the first look of mode `auto` would, each time with other tensions,
drawn at random. What came of it is kept. Then a critic learns from these trials how likely the answer is right, given
question, picture and tensions; and [`~arr_coc.balancing.Steering`] learns to set the tensions for which the critic
expects most, less the price of the tokens that they cost (`thrift`). The critic is not kept. Nothing else learns: the
layer looks where it did, and keeps what it kept wherever a call says how many tokens stay.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call

from arr_coc.balancing import MOST_STEERED, TENSIONS, Steering, steer
from arr_coc.config import Budget
from arr_coc.data.example import Examples
from arr_coc.data.sources import open_answers, sizes_of, take_readable
from arr_coc.families.family import open_family
from arr_coc.gaze.loop import GROWTH, LAST_OF_SMALL, LEEWAY
from arr_coc.inference.load import load_model, load_processor
from arr_coc.inference.session import Session
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.question import ChatTokens
from arr_coc.prompting.settings import Settings
from arr_coc.realizing import ARRCOCLayer
from arr_coc.runtime.atomic_files import set_aside
from arr_coc.selectors.contract import Selection, TokenSelector, VisualQuery
from arr_coc.selectors.grouping import group_queries
from arr_coc.training.answers import AnswerBatch, make_batch, read_answers
from arr_coc.training.config import TrainConfig
from arr_coc.training.feature_cache import cache_directory, features_key, weights_key
from arr_coc.training.stage import Stage, open_layer

Progress = Callable[[str, int], None]

# Trials of a question, and questions of a file of trials.
COUNT, SHARD = 8, 48
# Questions that are tried together.
TOGETHER = 8
# The share of a picture that a first look reads if nothing is steered.
FIRST_SHARE = GROWTH * LAST_OF_SMALL
# What moving a tension costs if it makes no other difference.
HABIT = 0.001
# Questions of a step, times the batch size: trials are rows of a table, and cheap.
ROWS = 8


class Trials(NamedTuple):
    """What came of trying questions: `n` questions, `T` trials of each.

    Args:
        facts (`Tensor` of shape `[n, F]`): of each question and its picture, for the steering.
        usual (`Tensor` of shape `[n, 3]`): tensions that were not moved.
        moves (`Tensor` of shape `[n, T, 3]`): of the tensions, in logits.
        chance (`Tensor` of shape `[n, T]`): probability of the right answer.
        share (`Tensor` of shape `[n, T]`): of the tokens that was read.
    """

    facts: Tensor
    usual: Tensor
    moves: Tensor
    chance: Tensor
    share: Tensor

    def rows(self, numbers: Sequence[int], device: Any) -> Trials:
        """Some of the questions, on a device."""
        chosen = torch.tensor(numbers, dtype=torch.long)
        return Trials(*(part[chosen].to(device) for part in self))


class TryingSelector(TokenSelector):
    """A layer whose tensions are moved by what a trial says, instead of its steering; keeps what that would see.

    Args:
        layer (`ARRCOCLayer`): chooses.
    """

    ordered = True

    def __init__(self, layer: ARRCOCLayer) -> None:
        self.layer = layer
        self.moves = torch.zeros(0, len(TENSIONS))  # of each picture, in the trial that is next
        self.facts = torch.zeros(0)  # [B, F] of the last call
        self.usual = torch.zeros(0)  # [B, 3]

    @property
    def default_introspect(self) -> Any:  # type: ignore[override]
        """Of the layer."""
        return self.layer.default_introspect

    def check(self, queries: Sequence[VisualQuery]) -> None:
        """Refuse models of another width."""
        self.layer.check(queries)

    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Choose tokens with the moved tensions."""
        found: dict[int, tuple[Selection, Tensor, Tensor]] = {}
        for places, inputs in group_queries(queries):
            moves, seen = self.moves[places], list[Tensor]()

            def move(module: nn.Module, given: Any, moved: Tensor, moves: Tensor = moves, seen: Any = seen) -> Tensor:
                seen.append(given[0])
                return moves.to(moved)

            replays, self.layer.use_graphs = self.layer.use_graphs, False  # a recording would not call the hook
            try:
                with self.layer.steering.register_forward_hook(move):
                    output = self.layer(**inputs, budget=budget, gather=False)
            finally:
                self.layer.use_graphs = replays
            usual = steer(output.tensions, -moves.to(output.tensions))
            for row, place in enumerate(places):
                picture = output.picture(row)
                selection = Selection(indices=picture.indices[0], output=picture)
                found[place] = selection, seen[0][row], usual[row]
        ordered = [found[place] for place in range(len(queries))]
        selections, facts, tensions = zip(*ordered, strict=True)
        self.facts, self.usual = torch.stack(facts), torch.stack(tensions)
        return list(selections)


@torch.no_grad()
def try_questions(layer: ARRCOCLayer, base: Any, batch: AnswerBatch, settings: Settings) -> Trials:
    """Answer the questions of a batch, with one picture each, with other tensions each time.

    Args:
        layer (`ARRCOCLayer`): chooses.
        base (`PreTrainedModel`): answers.
        batch (`AnswerBatch`): its `draw` decides the tensions.
        settings (`Settings`): how prompts are shortened.
    """
    generator = torch.Generator().manual_seed(batch.draw)
    count, lengths = len(batch.weights), (batch.inputs["labels"] != -100).sum(dim=1)
    moves = MOST_STEERED * (2 * torch.rand(count, COUNT, len(TENSIONS), generator=generator) - 1)
    selector = TryingSelector(layer)
    shared = replace(settings, budget=FIRST_SHARE, leeway=LEEWAY, encoded=Encodings())
    session = Session(open_family(base), selector, shared)
    chances, shares = [], []
    for trial in range(COUNT):
        selector.moves = moves[:, trial]
        run = session.prepare(batch.inputs)
        loss, _ = read_answers(base, run.inputs)
        chances.append(torch.exp(-loss * lengths))  # of all tokens of the answer; the loss is their mean
        shares.append(torch.tensor(run.used_counts) / torch.tensor(run.full_counts))
    return Trials(
        selector.facts.float().cpu(), selector.usual.float().cpu(), moves, torch.stack(chances, dim=1).cpu(),
        torch.stack(shares, dim=1),
    )  # fmt: skip


def write_trials(
    directory: Path,
    source: Examples,
    count: int,
    seed: int,
    make: Callable[[list[Any], int], AnswerBatch],
    attempt: Callable[[AnswerBatch], Trials],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Try the questions of a source and keep what came of it; files that are there are taken as they are."""
    directory.mkdir(parents=True, exist_ok=True)
    for first in range(0, count, SHARD):
        path = directory / f"{first:06}.safetensors"
        numbers = range(first, min(first + SHARD, count))
        if not path.exists():
            rng = random.Random(f"trials {seed} {first}")
            parts = []
            for start in range(0, len(numbers), TOGETHER):
                examples = [take_readable(source, number) for number in numbers[start : start + TOGETHER]]
                parts.append(attempt(make(examples, rng.randrange(2**31))))
            content = {
                name: torch.cat(columns).contiguous()
                for name, columns in zip(Trials._fields, zip(*parts, strict=True), strict=True)
            }
            with set_aside(path) as aside:
                save_file(content, aside)
        if progress is not None:
            progress(numbers[-1] + 1)


def read_trials(directory: Path, count: int) -> Trials:
    """The trials of a directory's first questions."""
    paths = sorted(directory.glob("*.safetensors"))
    parts = [load_file(path) for path in paths]
    return Trials(*(torch.cat([part[name] for part in parts])[:count] for name in Trials._fields))


class Critic(nn.Module):
    """How likely the answer is right, from the facts of a question `[..., F]` and the moves of its tensions.

    Args:
        facts (`int`): how many there are.
    """

    def __init__(self, facts: int, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(facts)
        self.layers = nn.Sequential(
            nn.Linear(facts + len(TENSIONS), width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def forward(self, facts: Tensor, moves: Tensor) -> Tensor:
        """Logits `[...]` of being right."""
        logits: Tensor = self.layers(torch.cat([self.norm(facts), moves / MOST_STEERED], dim=-1))
        return logits[..., 0]


class TrialsTask(nn.Module):
    """The layer's steering, and the critic that it learns from.

    Args:
        layer (`ARRCOCLayer`): of which only the steering learns.
        thrift (`float`): the price of all tokens of a picture.
    """

    def __init__(self, layer: ARRCOCLayer, thrift: float) -> None:
        super().__init__()
        self.steering: Steering = layer.steering.requires_grad_(True)
        self.critic, self.thrift = Critic(layer.steering.facts), thrift

    def forward(self, batch: Trials) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses of a batch of questions, and what the critic thinks of how they are steered."""
        facts = batch.facts[:, None].expand(-1, batch.moves.shape[1], -1)  # [n, T, F]
        doubt = F.binary_cross_entropy_with_logits(self.critic(facts, batch.moves), batch.chance.clamp(0, 1))
        moved = self.steering(batch.facts)  # [n, 3]
        fixed = {name: value.detach() for name, value in self.critic.named_parameters()}
        chance = torch.sigmoid(functional_call(self.critic, fixed, (batch.facts, moved)))
        detail = steer(batch.usual, moved)[:, 0]
        share = (FIRST_SHARE * LEEWAY ** (2 * detail - 1)).clamp(max=1)
        worth = chance - self.thrift * share
        habit = HABIT * moved.square().sum(dim=-1).mean()
        measures = {"accuracy": chance.mean(), "tokens": share.mean(), "worth": worth.mean()}
        return {"critic": doubt, "steering": habit - worth.mean()}, {
            name: value.detach() for name, value in measures.items()
        }


def open_trials_stage(config: TrainConfig, accelerator: Any, progress: Progress | None = None) -> Stage:
    """Try the questions of all sources, as far as they are not in the cache, and open what came of it.

    Args:
        config (`TrainConfig`): of the run.
        accelerator (`accelerate.Accelerator`): on whose device, and over whose processes, it runs.
        progress (`Callable`, *optional*): told the name of a source and how many of its questions were tried.
    """
    opened = {name: open_answers(name, config.samples, config.seed) for name in dict.fromkeys(config.data)}
    model: Any = load_model(config.base, dtype=torch.float32).requires_grad_(False).to(accelerator.device)
    processor = load_processor(config.base)
    layer = open_layer(model, config.start).requires_grad_(False).to(accelerator.device).eval()
    chat = ChatTokens.from_tokenizer(processor.tokenizer)
    asked = config.introspect or "auto"  # as in mode auto; the layer's own setting stays as it is
    settings = Settings(chat=chat, on_error="raise", query_layers=config.query_layers, introspect=asked)
    looking = nn.ModuleDict({name: part for name, part in layer.named_children() if name != "steering"})
    weights = f"{weights_key(model)} {weights_key(looking)}"
    folder = Path(config.cache or cache_directory()) / "trials"
    attempt = partial(try_questions, layer, model, settings=settings)

    def make(examples: list[Any], draw: int) -> AnswerBatch:
        return make_batch(processor, examples, 0, draw, accelerator.device)

    tables: dict[str, Trials] = {}
    for name, source in opened.items():
        count = min(config.samples, len(source))
        trial = (FIRST_SHARE, LEEWAY, COUNT, MOST_STEERED, asked)
        parts = (config.samples, config.seed, config.query_layers, trial, sizes_of(name))
        place = folder / features_key(weights, processor, layer, name, *parts)
        told = None if progress is None else partial(progress, name)
        with accelerator.main_process_first():
            write_trials(place, source, count, config.seed, make, attempt, told)
        tables[name] = read_trials(place, count)
    size = ROWS * config.batch_size
    joined = Trials(*(torch.cat(columns) for columns in zip(*(tables[name] for name in config.data), strict=True)))
    ends = list(accumulate(len(tables[name].facts) for name in config.data))

    def batch_at(step: int) -> Trials:
        rng = random.Random(f"trials {config.seed} {step}")
        drawn = draw_rows(ends, size * accelerator.num_processes, rng)
        return joined.rows(drawn[accelerator.process_index :: accelerator.num_processes], accelerator.device)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # of the critic
        task = TrialsTask(layer, config.thrift).to(accelerator.device)
    return Stage(task, layer, batch_at)


def draw_rows(ends: Sequence[int], size: int, rng: random.Random) -> list[int]:
    """Numbers of questions, equally many of each source; a source's questions end where `ends` says.

    Example:

    ```python
    >>> import random
    >>> from arr_coc.training.trials import draw_rows
    >>> [number >= 100 for number in draw_rows([100, 103], 4, random.Random(0))]
    [True, False, True, False]

    ```
    """
    begins = [0, *ends[:-1]]
    first = rng.randrange(len(ends))  # so that a small batch is not always of the same sources
    places = [(first + place) % len(ends) for place in range(size)]
    return [rng.randrange(begins[place], ends[place]) for place in places]
