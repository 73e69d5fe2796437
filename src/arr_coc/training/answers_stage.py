"""`arr-coc train --stage answers` and `hard`: the loss of a frozen model's own answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from arr_coc.data.sources import open_answers, take_readable
from arr_coc.families.family import open_family
from arr_coc.gaze.compression import make_compressor
from arr_coc.inference.load import load_model, load_processor
from arr_coc.prompting.question import ChatTokens
from arr_coc.training.answers import AnswersTask, Asking, BudgetPlan, make_asking
from arr_coc.training.trainer import LoopConfig, Say, check_run, open_accelerator, open_layer, train

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def train_answers(
    data: Sequence[str],
    out: str | Path,
    base: str = "embedded",
    config: LoopConfig | None = None,
    *,
    start: str | Path | None = None,
    samples: int = 2000,
    estimator: str = "gate",
    budget: str = "0.25",
    reward: str = "likelihood",
    thrift: float = 0.0,
    lora: int = 0,
    last_layers: int = 0,
    hard: bool = False,
    mode: str = "prune",
    compress: str | None = None,
    query_layers: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    resume: bool = False,
    say: Say | None = None,
) -> Path:
    """Train a selector by what a frozen model answers from the tokens it chose.

    Args:
        data (`Sequence[str]`): sources, each with an equal share; see [`~arr_coc.data.sources.open_answers`].
        out (`str` or `Path`): directory of the run.
        base (`str`, *optional*, defaults to `"embedded"`): directory or Hub id of the model.
        config (`LoopConfig`, *optional*): see there.
        start (`str` or `Path`, *optional*): a selector to go on from, such as that of stage `proxy`.
        samples (`int`, *optional*, defaults to 2000): samples of each world.
        estimator (`str`, *optional*, defaults to `"gate"`): see [`~arr_coc.training.estimators`].
        budget (`str`, *optional*, defaults to `"0.25"`): see [`~arr_coc.training.answers.BudgetPlan`].
        reward (`str`, *optional*, defaults to `"likelihood"`): of `reinforce`, or `"accuracy"`.
        thrift (`float`, *optional*, defaults to 0.0): what the tokens of budget `auto` cost in the loss. The answer's
            loss does not reach their number: this alone pushes it, towards the layer's `min_tokens`.
        lora (`int`, *optional*, defaults to 0): rank of LoRA matrices on the base's attention, saved in `out/adapter`;
            0 leaves the base frozen.
        last_layers (`int`, *optional*, defaults to 0): how many of the language model's last layers learn too; the
            base is then saved whole in `out/base`.
        hard (`bool`, *optional*, defaults to `False`): camouflage, needles and crowded scenes count double.
        mode (`str`, *optional*, defaults to `"prune"`): or `"saccade"`: gestalt and saccades of what the processor
            delivers, for `gate`, `gumbel` and `none`.
        compress (`str`, *optional*): of the gestalt, see [`Gaze`]. `"conv"` trains a compressor; with the estimator
            `none` nothing else, and then all of the budget is the gestalt's.
        dtype (`str`, *optional*, defaults to `"float32"`): of the base, or `"bfloat16"`; the selector is float32.
        query_layers, device, resume, say: as in [`~arr_coc.training.proxy_stage.train_proxy`].
    """
    config = config or LoopConfig(batch_size=16, rate=1e-3)
    if not data:
        raise ValueError("`data` is empty; name at least one source")
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be {' or '.join(DTYPES)}, got {dtype!r}")
    if lora and last_layers:
        raise ValueError("`lora` and `last_layers` are two ways to let the base learn; choose one")
    plan = BudgetPlan.parse(budget)
    about = {
        "stage": "hard" if hard else "answers", "data": list(data), "base": base, "samples": samples,
        "start": None if start is None else str(start), "estimator": estimator, "budget": budget, "reward": reward,
        "thrift": thrift, "lora": lora, "last_layers": last_layers, "query_layers": query_layers, "dtype": dtype,
        "mode": mode, "compress": compress,
    }  # fmt: skip
    check_run(Path(out), config, about, resume)
    accelerator = open_accelerator(device)
    sources = [open_answers(name, samples, config.seed, hard) for name in data]
    model: Any = load_model(base, dtype=DTYPES[dtype]).requires_grad_(False).to(accelerator.device)
    processor = load_processor(base)
    layer = open_layer(model, start)
    if compress == "conv" and layer.compressor is None:
        levels = 1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ())
        layer.config = replace(layer.config, compressor_levels=levels)
        layer.compressor = make_compressor(layer.config)
    layer = layer.to(accelerator.device)
    if last_layers:
        _free_last_layers(model, last_layers)
    tuned = _add_lora(model, lora, config.seed) if lora else model
    chat = ChatTokens.from_tokenizer(processor.tokenizer)
    task = AnswersTask(
        layer, tuned, estimator, chat, plan, config.steps, config.seed, reward, thrift, query_layers, mode,
        compress,
    )  # fmt: skip
    size, own = config.batch_size * accelerator.num_processes, accelerator.process_index

    def batch_at(step: int) -> Asking:
        rng = random.Random(f"answers {config.seed} {step}")
        chosen = [rng.choice(sources) for _ in range(size)]
        numbers = [rng.randrange(len(source)) for source in chosen]
        mine = list(zip(chosen, numbers, strict=True))[own :: accelerator.num_processes]
        asked = [take_readable(source, number) for source, number in mine]
        return make_asking(processor, asked, step, rng.randrange(2**31) + own, accelerator.device)

    done = train(out, task, layer, batch_at, config, accelerator=accelerator, resume=resume, about=about, say=say)
    if lora and accelerator.is_main_process:
        tuned.save_pretrained(done / "adapter")
    if last_layers and accelerator.is_main_process:
        model.save_pretrained(done / "base")
        processor.save_pretrained(done / "base")
    return done


def _free_last_layers(model: Any, count: int) -> None:
    """Let the last layers of the language model learn."""
    layers = open_family(model).inner.language_model.layers
    if count > len(layers):
        raise ValueError(f"`last_layers` must be at most {len(layers)} for this model, got {count}")
    layers[-count:].requires_grad_(True)


def _add_lora(model: Any, rank: int, seed: int) -> Any:
    """LoRA on queries and values of the language model."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("LoRA needs peft; install arr-coc[train]") from None
    torch.manual_seed(seed)
    targets = r".*language_model.*\.(q_proj|v_proj)"
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
