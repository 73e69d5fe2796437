"""Every setting of a training run, one strict dataclass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arr_coc.config import EMBEDDED, Introspect, check_introspect
from arr_coc.gaze.compression import check_compress
from arr_coc.runtime.machine import check_device
from arr_coc.training.estimators import ESTIMATORS
from arr_coc.training.schedule import BudgetPlan

STAGES = ("proxy", "distill", "answers", "hard", "trials")
# Those that learn from what was encoded or tried before, and run no language model meanwhile.
ENCODED = ("proxy", "distill", "trials")
REWARDS = ("likelihood", "accuracy")
MODES = ("prune", "saccade")
DTYPES = ("float32", "bfloat16")
# Estimators that can be trained through saccades: the others read all tokens, or draw from cells that are not encoded.
GAZING = ("gate", "gumbel", "none")

# What `run.json` says of every run, and of the stages that answer.
_RECORDED = (
    "steps", "batch_size", "rate", "warm_up", "seed", "save_every", "log_every",
    "stage", "data", "base", "start", "samples", "query_layers", "introspect",
)  # fmt: skip
_ANSWERING = (
    "estimator", "budget", "reward", "thrift", "lora", "last_layers", "dtype", "mode", "compress",
)  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run; wrong ones are refused when it is made.

    Args:
        data (`Sequence[str]`):
            Sources, each with an equal share; see [`~arr_coc.data.sources`].
        out (`str` or `Path`):
            Directory of the run: the selector, `run.json`, `log.jsonl`, checkpoints.
        stage (`str`, *optional*, defaults to `"proxy"`):
            `"proxy"` learns from boxes and maps, and runs no language model. `"distill"` learns from where the frozen
            model looks while it reads all tokens, of any pictures with any questions. `"answers"` learns from what the
            frozen model answers. `"hard"` is the same, with camouflage, needles and crowded scenes counted double.
            `"trials"` learns how many tokens a question needs, and of which kind, from answers and a price (`thrift`).
        base (`str`, *optional*, defaults to `"embedded"`):
            Directory or Hub id of the model.
        start (`str` or `Path`, *optional*):
            Selector to start from: a directory, such as that of stage `proxy`, or `arr-coc`, which was trained for the
            embedded model; by default `arr-coc-untrained`.
        steps (`int`, *optional*, defaults to 1000):
            Steps of the optimizer.
        batch_size (`int`, *optional*, defaults to 32):
            Questions of a step in one process.
        rate (`float`, *optional*):
            Highest learning rate; it falls with a cosine. By default 3e-3 for `proxy`, `distill` and `trials`, and 1e-3
            for the others.
        warm_up (`int`, *optional*, defaults to 50):
            Steps until the highest rate is reached.
        seed (`int`, *optional*, defaults to 0):
            Of the order, of everything that is drawn at random, and of each world's first example.
        samples (`int`, *optional*, defaults to 2000):
            Examples of each world.
        estimator (`str`, *optional*, defaults to `"gate"`):
            How the answer's loss reaches the selector; see [`~arr_coc.training.estimators`].
        budget (`str`, *optional*, defaults to `"0.25"`):
            How many tokens are read; see [`~arr_coc.training.schedule.BudgetPlan`].
        reward (`str`, *optional*, defaults to `"likelihood"`):
            Of the estimator `reinforce`, or `"accuracy"`.
        thrift (`float`, *optional*, defaults to 0.0):
            What tokens cost. In stage `trials` the price of all tokens of a picture, where a right answer is worth 1;
            that stage needs one. In `answers` and `hard` what those of budget `auto` cost in the loss: the answer's
            loss does not reach their number, so that this alone pushes it, towards the layer's `min_tokens`.
        lora (`int`, *optional*, defaults to 0):
            Rank of LoRA matrices on the base's attention, saved in `out/adapter`; 0 leaves the base frozen.
        last_layers (`int`, *optional*, defaults to 0):
            How many of the language model's last layers learn too; the base is then saved whole in `out/base`.
        query_layers (`int`, *optional*, defaults to 0):
            Layers of the language model that read the question first, as in [`~arr_coc.prepare`].
        introspect (`"auto"`, `"on"`, `"off"` or `int`, *optional*):
            Whether the selector asks the model where it looks, while it learns and later; by default as in `start`.
        mode (`str`, *optional*, defaults to `"prune"`):
            Or `"saccade"`: gestalt and saccades of what the processor delivers, for `gate`, `gumbel` and `none`.
        compress (`str`, *optional*):
            How the gestalt is compressed, see [`~arr_coc.gaze.plan.Gaze`]. `"conv"` trains a compressor; with the
            estimator `none` nothing else, and then all of the budget is the gestalt's.
        dtype (`str`, *optional*, defaults to `"float32"`):
            Of the base in `answers` and `hard`, or `"bfloat16"`; the selector is float32.
        save_every (`int`, *optional*, defaults to 200):
            Steps between checkpoints.
        log_every (`int`, *optional*, defaults to 10):
            Steps between lines of the log.
        cache (`str` or `Path`, *optional*):
            Where `proxy`, `distill` and `trials` keep what they learn from; see
            [`~arr_coc.training.feature_cache.cache_directory`].
        device (`str`, *optional*, defaults to `"cpu"`):
            `"cpu"` or `"cuda"`.
        resume (`bool`, *optional*, defaults to `False`):
            Go on from the last checkpoint of `out`.

    Example:

    ```python
    >>> from arr_coc.training.config import TrainConfig
    >>> config = TrainConfig(["scenes"], "runs/one", stage="answers", steps=100, warm_up=10)
    >>> config.highest_rate, config.rate_at(0) < config.rate_at(9) > config.rate_at(99)
    (0.001, True)

    ```
    """

    data: Sequence[str]
    out: str | Path
    stage: str = "proxy"
    base: str = EMBEDDED
    start: str | Path | None = None
    steps: int = 1000
    batch_size: int = 32
    rate: float | None = None
    warm_up: int = 50
    seed: int = 0
    samples: int = 2000
    estimator: str = "gate"
    budget: str = "0.25"
    reward: str = "likelihood"
    thrift: float = 0.0
    lora: int = 0
    last_layers: int = 0
    query_layers: int = 0
    introspect: Introspect | None = None
    mode: str = "prune"
    compress: str | None = None
    dtype: str = "float32"
    save_every: int = 200
    log_every: int = 10
    cache: str | Path | None = None
    device: str = "cpu"
    resume: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.data, str):
            raise TypeError(f"`data` must be a list of sources, got the text {self.data!r}; use [{self.data!r}]")
        if not self.data:
            raise ValueError("`data` is empty; name at least one source")
        choices = {"stage": STAGES, "estimator": ESTIMATORS, "reward": REWARDS, "mode": MODES, "dtype": DTYPES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be {_listed(allowed)}, got {getattr(self, name)!r}")
        for name in ("steps", "batch_size", "samples", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        for name in ("warm_up", "seed", "thrift", "lora", "last_layers", "query_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)}")
        if not 0 < self.highest_rate < 1:
            raise ValueError(f"`rate` must lie between 0 and 1, got {self.rate}")
        if self.lora and self.last_layers:
            raise ValueError("`lora` and `last_layers` are two ways to let the base learn; choose one")
        if self.mode == "saccade" and self.estimator not in GAZING:
            raise ValueError(f"mode saccade can be trained with {_listed(GAZING)}, got estimator {self.estimator!r}")
        if self.compress is not None and self.mode != "saccade":
            raise ValueError(f"`compress` belongs to mode saccade, got mode {self.mode}")
        check_compress(self.compress)
        if self.stage == "trials" and self.thrift == 0:
            raise ValueError("stage trials learns what tokens are worth, so they need a price; give a `thrift` above 0")
        if self.introspect is not None:
            check_introspect(self.introspect)
        BudgetPlan.parse(self.budget)
        check_device(self.device)

    @property
    def highest_rate(self) -> float:
        """The highest learning rate: the one that was given, or the stage's."""
        if self.rate is not None:
            return self.rate
        return 3e-3 if self.stage in ENCODED else 1e-3

    def rate_at(self, step: int) -> float:
        """The learning rate of a step."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.highest_rate * min(1.0, (step + 1) / max(1, self.warm_up)) * (0.02 + 0.98 * cosine)

    def record(self) -> dict[str, Any]:
        """What `run.json` says of these settings."""
        names: tuple[str, ...] = _RECORDED if self.stage in ENCODED else _RECORDED + _ANSWERING
        if self.stage == "trials":
            names = (*names, "thrift")
        values = {name: getattr(self, name) for name in names}
        start = None if self.start is None else str(self.start)
        return values | {"rate": self.highest_rate, "data": list(self.data), "start": start}


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
