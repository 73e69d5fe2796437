"""Train the embedded model from nothing, or go on from weights; README.md has the commands of all courses.

Needs one GPU. The language model learns answers. The encoder's tokens also learn which words lie under them, through a
linear head of their own that shares nothing with the word embeddings and is not shipped. The base never sees pruned
prompts.
"""

from __future__ import annotations

import json
import math
import queue
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import transformers
import typer
from courses import COURSES, Kind
from data import SEEN, Batcher, Held, Stream
from fast import FastPath, patches
from muon import StackedMuon
from parts import make_config, make_processor, save_processor
from placing import Resampler, place, words_under
from safetensors.torch import load_file, save_file
from torch import nn

from arr_coc.data.coco import Photo, read_photos
from arr_coc.data.worlds.tools.drawing import extra_fonts

HEAD = "head.safetensors"
POOL = 40  # batches on the device


def make_head(width: int, start: Path | None) -> nn.Linear:
    """The head of the dense loss, one row a word of `SEEN`; rows that an earlier course learned are kept, by name."""
    head = nn.Linear(width, len(SEEN))
    nn.init.zeros_(head.weight)
    nn.init.constant_(head.bias, -3.0)  # words are rare
    if start is not None and (start / HEAD).exists():
        rows = load_file(start / HEAD)
        with torch.no_grad():
            for number, word in enumerate(SEEN):
                if word in rows:
                    head.weight[number], head.bias[number] = rows[word][:-1], rows[word][-1]
    return head


class Trainer:
    """Model, fast path, and the two losses."""

    def __init__(
        self,
        start: Path | None,
        seed: int,
        device: str,
        compiled: bool,
        tokens: int,
        course: str = "scenes",
        photos: dict[str, list[Photo]] | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.processor = make_processor(1024)
        self.tokenizer = self.processor.tokenizer
        if start is None:
            self.model: Any = transformers.Qwen3VLForConditionalGeneration(make_config(self.tokenizer))
        else:
            self.model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
            # words may have been added at the end of the list
            self.model.resize_token_embeddings(make_config(self.tokenizer).text_config.vocab_size)
        self.model.to(self.device)
        self.fast = FastPath(self.model, compiled)
        self.batcher = Batcher(self.tokenizer, tokens, course, photos)
        self.head = make_head(self.model.config.text_config.hidden_size, start).to(self.device)
        self.resample = Resampler(compiled)
        self.losing = torch.compile(dense_loss, dynamic=True) if compiled else dense_loss

    def to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        pin = self.device.type == "cuda"
        found = {
            name: (value.pin_memory() if pin else value).to(self.device, non_blocking=True)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in batch.items()
        }
        # [B, F, H, W, 3] -> [B, F, 3, H, W]; a loader makes lists of tuples
        planes = found["pictures"].permute(0, 1, 4, 2, 3).contiguous()
        return found | {"pictures": planes, "grid": tuple(batch["grid"])}

    def forward(self, batch: dict[str, Any], moved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits at the answers `[M, V]`, and the loss of the words under each token."""
        where = place(batch["sizes"], batch["grid"], moved)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            pictures = self.resample(batch["pictures"], batch["sizes"], where, batch["grid"])
            tokens, levels = self.fast.encode(pictures, batch["grid"])
            hidden = self.fast.read(batch, tokens, levels)
            table = self.model.model.language_model.embed_tokens.weight
            answers = F.linear(hidden.flatten(0, 1)[batch["where"]], table)
            under = self.head(tokens).view(batch["images"], -1, len(SEEN))  # [B, G * N, W] -> [B * G, N, W]
        return answers.float(), self.losing(under, words_under(batch, where, len(SEEN)))

    def losses(self, batch: dict[str, Any], moved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the answers, and of the words under the tokens."""
        answers, dense = self.forward(batch, moved)
        return F.cross_entropy(answers, batch["targets"]), dense

    def evaluate(self, held: list[dict[str, Any]]) -> dict[str, float]:
        """Share of exact answers by kind; with gradients, for which alone the blocks were compiled."""
        self.model.eval()
        right: dict[str, list[bool]] = {}
        for batch in held:
            batch = self.to_device(batch)
            answers = self.forward(batch)[0].detach()
            wrong = torch.zeros_like(batch["labels"], dtype=torch.bool).flatten()
            wrong[batch["where"]] = answers.argmax(dim=-1) != batch["targets"]
            wrong = wrong.view_as(batch["labels"])
            right.setdefault(batch["kind"], []).extend((~wrong.any(dim=1)).tolist())
        self.model.train()
        return {kind: round(sum(found) / len(found), 4) for kind, found in right.items()}

    def save(self, out: Path, curve: list[dict[str, Any]]) -> None:
        """Write the model in bf16 with its processor, in shards below 12 MB, and the curve so far."""
        aside = out.with_name(f".{out.name}")
        model = transformers.Qwen3VLForConditionalGeneration(self.model.config).to(torch.bfloat16)
        model.load_state_dict({name: value.to(torch.bfloat16) for name, value in self.model.state_dict().items()})
        model.generation_config.update(
            eos_token_id=self.tokenizer.eos_token_id, pad_token_id=self.tokenizer.pad_token_id
        )
        for part in (model.config.text_config, model.config.vision_config):
            part.dtype = torch.bfloat16  # not that of the weights it went on from
        model.save_pretrained(aside, max_shard_size="11MB")
        save_processor(self.processor, aside)
        rows = torch.cat([self.head.weight, self.head.bias[:, None]], dim=1).detach().cpu()
        save_file({word: row.clone() for word, row in zip(SEEN, rows, strict=True)}, aside / HEAD)
        (aside / "curve.json").write_text(json.dumps(curve, indent=0) + "\n")
        if out.exists():
            for path in out.iterdir():
                path.unlink()
            out.rmdir()
        aside.rename(out)


def dense_loss(under: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """A sum over words and tokens, by the number of words there are."""
    weight = torch.full((under.shape[-1],), 4.0, device=under.device)
    dense = F.binary_cross_entropy_with_logits(under.float(), seen.float(), pos_weight=weight, reduction="sum")
    return dense / (seen.sum() + len(seen))


def make_optimizers(model: nn.Module, head: nn.Module, cuda: bool) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, at twice the rate of AdamW for tables, norms, biases and the head."""
    matrices, decayed, others = [], [], [*head.parameters()]
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            matrices.append(weight)
        else:
            (decayed if weight.ndim >= 2 else others).append(weight)
    muon = StackedMuon(matrices)
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.98), fused=cuda,
    )  # fmt: skip
    for optimizer, times in ((muon, 2.0), (adam, 1.0)):
        for group in optimizer.param_groups:
            group["times"] = times
    return [muon, adam]


def rate_at(done: float, step: int, falling: float, warm: int = 300) -> float:
    """Share of the highest rate: it rises, holds, and falls to a hundredth in the last part of the course."""
    fallen = max(0.0, (done - 1 + falling) / falling) if falling else 0.0
    return min(1.0, (step + 1) / warm) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * fallen)))


def bring(trainer: Trainer, loader: Iterator[dict[str, Any]], ready: queue.Queue[Any]) -> None:
    """Carry batches to the device while others are trained on; what goes wrong is carried too."""
    cuda = trainer.device.type == "cuda"
    stream = torch.cuda.Stream() if cuda else None
    try:
        for batch in loader:
            if stream is None:
                ready.put(trainer.to_device(batch))
                continue
            with torch.cuda.stream(stream):
                carried = trainer.to_device(batch)
            stream.synchronize()
            ready.put(carried)
    except Exception as error:
        ready.put(error)


def take(ready: queue.Queue[Any]) -> dict[str, Any]:
    """The next batch, or an error instead of waiting for ever."""
    found = ready.get(timeout=120)
    if isinstance(found, Exception):
        raise RuntimeError("no more batches") from found
    batch: dict[str, Any] = found
    return batch


def fill(held: list[dict[str, Any]], dataset: Held, workers: int) -> None:
    """Draw what is held out, meanwhile."""

    def draw() -> None:
        held.extend(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers))

    threading.Thread(target=draw, daemon=True).start()


@torch.no_grad()
def check(trainer: Trainer, kind: Kind) -> float:
    """Largest difference between the fast path and the model's own forward, in logits, as a share of their spread."""
    [part] = [part for part in COURSES["all"] if kind in part.kinds]
    batch = trainer.to_device(trainer.batcher.held("validation", 0, kind, part, random.Random(0)))
    where = place(batch["sizes"], batch["grid"], False)
    pictures = trainer.resample(batch["pictures"], batch["sizes"], where, batch["grid"]).round()
    hidden = trainer.fast.read(batch, *trainer.fast.encode(pictures, batch["grid"]))
    fast = trainer.model.lm_head(hidden.to(trainer.model.dtype)).float()
    worst = 0.0
    for row in range(2):
        text = batch["ids"][row][batch["turn"][row] > 0]
        ids = torch.cat([batch["opening"], text])[None]
        clip = pictures.shape[1] > 1
        grid = torch.tensor([[batch["groups"], *(2 * side for side in batch["grid"])]], device=trainer.device)
        frames = pictures[row : row + 1].expand(-1, -1 if clip else 2, -1, -1, -1)
        pixels = patches(frames, torch.float32).flatten(0, 1)
        given = {"pixel_values_videos": pixels, "video_grid_thw": grid} if clip else {
            "pixel_values": pixels, "image_grid_thw": grid}  # fmt: skip
        marks = (ids == trainer.batcher.image).int() + 2 * (ids == trainer.batcher.video).int()
        logits = trainer.model(input_ids=ids, mm_token_type_ids=marks, **given).logits[0, -len(text) :].float()
        worst = max(worst, float((logits - fast[row, : len(text)]).abs().max() / logits.std()))
    return worst


def main(
    seconds: Annotated[float, typer.Option(help="How long to train.")] = 1100,
    out: Annotated[Path, typer.Option(help="Where the model goes.")] = Path("runs/embedded"),
    start: Annotated[Path | None, typer.Option(help="Go on from this model.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, and of the first picture.")] = 0,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1.5e-3,
    falling: Annotated[float, typer.Option(help="Last part of the time, in which the rate falls.")] = 1.0,
    tokens: Annotated[int, typer.Option(help="Visual tokens of a batch.")] = 36864,
    workers: Annotated[int, typer.Option(help="Processes that draw.")] = 15,
    reuse: Annotated[int, typer.Option(help="How often a batch is used at most, until the next is drawn.")] = 6,
    every: Annotated[float, typer.Option(help="Seconds between evaluations.")] = 120,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    compiled: Annotated[bool, typer.Option(help="Compile the blocks.")] = True,
    course: Annotated[str, typer.Option(help="What is drawn, see courses.py.")] = "scenes",
    photos: Annotated[
        Path | None, typer.Option(help="Folder with train and validation, each in COCO format, for the wide course.")
    ] = None,
) -> None:
    begin = time.time()
    # its backward with a mask gives NaN for some lengths on Hopper (pytorch issue 196678)
    torch.backends.cuda.enable_cudnn_sdp(False)
    shown = {} if photos is None else {split: read_photos(photos / split) for split in ("train", "validation")}
    trainer = Trainer(start, seed, device, compiled and device == "cuda", tokens, course, shown)
    model = trainer.model
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters", flush=True)
    print(f"{len(extra_fonts())} fonts beside Pillow's own, transformers {transformers.__version__}", flush=True)
    if device == "cuda" and not extra_fonts():
        raise typer.BadParameter("matplotlib is not installed; its fonts are needed for variety")
    if device == "cpu":
        for kind in (("scenes", "read"), ("clips", "clip_first")):
            print(f"{kind[0]}: fast path differs from the model by {check(trainer, kind):.1e}", flush=True)
    first = seed * 10**12  # a run that goes on has a seed of its own, and sees other pictures
    stream = Stream(trainer.batcher, first, seconds)
    ahead = {"num_workers": workers, "prefetch_factor": 3 if workers else None}
    loader = iter(torch.utils.data.DataLoader(stream, batch_size=None, **ahead))
    held: list[dict[str, Any]] = []
    fill(held, Held(Batcher(trainer.tokenizer, tokens // 4, course, shown), "validation", 2), 2 if workers else 0)
    ready: queue.Queue[Any] = queue.Queue(maxsize=6)
    threading.Thread(target=bring, args=(trainer, loader, ready), daemon=True).start()
    optimizers = make_optimizers(model, trainer.head, device == "cuda")
    learned = [*model.parameters(), *trainer.head.parameters()]
    pool: list[list[Any]] = []  # batches on the device, and how often each may still be used
    rng = random.Random(seed)
    curve: list[dict[str, Any]] = []
    step, pictures, drawn, waited, last = 0, 0, 0, 0.0, time.time()
    recent: list[torch.Tensor] = []
    model.train()
    trained_from = time.time()
    while (done := (time.time() - trained_from) / seconds) < 1:
        if not pool or not ready.empty():
            wait = time.time()
            pool.append([take(ready), reuse])
            waited += time.time() - wait
            drawn += 1
            if len(pool) > POOL:
                pool.pop(min(range(len(pool)), key=lambda number: pool[number][1]))
        chosen = rng.randrange(len(pool))
        batch, uses = pool[chosen]
        pool[chosen][1] -= 1
        if uses <= 1:
            pool.pop(chosen)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["times"] * rate * rate_at(done, step, falling)
            optimizer.zero_grad(set_to_none=True)
        answer, dense = trainer.losses(batch, moved=uses < reuse)
        (answer + 0.15 * dense).backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        recent.append(torch.stack([answer.detach(), dense.detach()]))
        step, pictures = step + 1, pictures + len(batch["kinds"])
        if step % 200 == 0 or step in (1, 20):
            answers, words = torch.stack(recent).mean(dim=0).tolist()
            recent.clear()
            entry = {"step": step, "seconds": round(time.time() - begin), "pictures": pictures,
                     "answer_loss": round(answers, 4), "dense_loss": round(words, 5)}  # fmt: skip
            curve.append(entry)
            print(entry, f"{drawn} batches drawn, waited {waited:.0f} s", flush=True)
        if time.time() - last > every:
            curve.append({"step": step, "seconds": round(time.time() - begin), "exact": trainer.evaluate(held)})
            print(curve[-1], flush=True)
            trainer.save(out, curve)
            last = time.time()
    curve.append({"step": step, "seconds": round(time.time() - begin), "exact": trainer.evaluate(held)})
    print(curve[-1], flush=True)
    trainer.save(out, curve)


if __name__ == "__main__":
    typer.run(main)
