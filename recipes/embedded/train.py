r"""Train the embedded model from nothing, or go on from weights.

    python recipes/embedded/train.py --seconds 1100 --out runs/embedded
    python recipes/embedded/train.py --seconds 1500 --seed 1 --rate 8e-4 --start src/arr_coc/assets/embedded \
        --course wide --photos photos --out runs/wide

Needs one GPU. The language model learns answers; the encoder's tokens also learn which words lie under them, scored
through the tied word embeddings. The base never sees pruned prompts.
"""

from __future__ import annotations

import json
import math
import queue
import random
import threading
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import transformers
import typer
from data import SEEN, Batcher, Held, Stream
from fast import FastPath
from parts import make_config, make_processor, save_processor

from arr_coc.data.coco import Photo, read_photos
from arr_coc.data.worlds.drawing import extra_fonts


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
        self.processor = make_processor(512 if course == "scenes" else 1024)
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
        self.before = torch.tensor(self.batcher.before, device=self.device)
        names = [self.tokenizer.encode(word, add_special_tokens=False) for word in SEEN]
        self.seen_ids = torch.tensor([word for name in names for word in name], device=self.device)
        self.seen_from = torch.tensor([0, *accumulate(map(len, names))][:-1], device=self.device)
        # sharpness and rarity of the dense loss; dropped afterwards
        self.dense = torch.nn.Parameter(torch.tensor([0.0, -3.0], device=self.device))

    def to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        pin = self.device.type == "cuda"
        return {
            name: (value.pin_memory() if pin else value).to(self.device, non_blocking=True)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in batch.items()
        }

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits at the answers `[M, V]`, and of the words under each token `[B, N, W]`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            tokens, levels = self.fast.encode(batch["pictures"], batch["grid"])
            hidden = self.fast.read(self.before, batch, tokens, levels)
            table = self.model.model.language_model.embed_tokens.weight
            answers = F.linear(hidden.flatten(0, 1)[batch["where"]], table)
            names = F.embedding_bag(self.seen_ids, table, self.seen_from, mode="mean")  # [W, D]
            under = F.linear(tokens, names.to(tokens.dtype))
        return answers.float(), under.float() * self.dense[0].exp() + self.dense[1]

    def losses(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the answers, and of the words under the tokens: a sum over both, by the number of words there are."""
        answers, under = self.forward(batch)
        return F.cross_entropy(answers, batch["targets"]), self.dense_loss(under, batch)

    def dense_loss(self, under: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        seen = batch["seen"].float()
        weight = torch.full((len(SEEN),), 4.0, device=self.device)
        dense = F.binary_cross_entropy_with_logits(under, seen, pos_weight=weight, reduction="sum")
        return dense / (seen.sum() + len(seen))

    def settle(self, batch: dict[str, Any], steps: int = 300) -> float:
        """Find sharpness and rarity of the dense loss for a model that was trained before, and its loss then."""
        with torch.no_grad():
            under = (self.forward(batch)[1] - self.dense[1]) / self.dense[0].exp()
        optimizer = torch.optim.Adam([self.dense], lr=0.05)
        for _ in range(steps):
            loss = self.dense_loss(under * self.dense[0].exp() + self.dense[1], batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self, held: list[dict[str, Any]]) -> dict[str, float]:
        """Share of exact answers by kind."""
        self.model.eval()
        right: dict[str, list[bool]] = {}
        for batch in held:
            batch = self.to_device(batch)
            answers, _ = self.forward(batch)
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
        (aside / "curve.json").write_text(json.dumps(curve, indent=0) + "\n")
        if out.exists():
            for path in out.iterdir():
                path.unlink()
            out.rmdir()
        aside.rename(out)


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


def check(trainer: Trainer) -> float:
    """Largest difference between the fast path and the model's own forward, in logits."""
    part = trainer.batcher.course[0]
    batch = trainer.to_device(trainer.batcher.held("validation", 0, ("scenes", "read"), part, random.Random(0)))
    small = {name: value[:2] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    from PIL import Image

    with torch.no_grad():
        tokens, levels = trainer.fast.encode(small["pictures"], small["grid"])
        hidden = trainer.fast.read(trainer.before, small, tokens, levels)
        fast = trainer.model.lm_head(hidden.to(trainer.model.dtype)).float()
        worst = 0.0
        for row in range(2):
            image = Image.fromarray(small["pictures"][row].cpu().numpy())
            images = trainer.processor.image_processor(images=[image], return_tensors="pt").to(trainer.device)
            text = small["ids"][row][small["turn"][row] > 0]
            count = small["grid"][0] * small["grid"][1]
            picture = torch.full((count,), trainer.batcher.image, device=trainer.device)
            ids = torch.cat([trainer.before, picture, text])[None]
            types = (ids == trainer.batcher.image).int()
            logits = trainer.model(input_ids=ids, mm_token_type_ids=types, **images).logits[0, -len(text) :].float()
            worst = max(worst, float((logits - fast[row, : len(text)]).abs().max() / logits.std()))
    return worst


def main(
    seconds: Annotated[float, typer.Option(help="How long to train.")] = 1100,
    out: Annotated[Path, typer.Option(help="Where the model goes.")] = Path("runs/embedded"),
    start: Annotated[Path | None, typer.Option(help="Go on from this model.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, and of the first picture.")] = 0,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1.5e-3,
    tokens: Annotated[int, typer.Option(help="Visual tokens of a batch.")] = 36864,
    workers: Annotated[int, typer.Option(help="Processes that draw.")] = 15,
    reuse: Annotated[int, typer.Option(help="How often a batch is used.")] = 2,
    every: Annotated[float, typer.Option(help="Seconds between evaluations.")] = 120,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    compiled: Annotated[bool, typer.Option(help="Compile the blocks.")] = True,
    course: Annotated[str, typer.Option(help="What is drawn: scenes or wide.")] = "scenes",
    photos: Annotated[
        Path | None, typer.Option(help="Folder with train and validation, each in COCO format, for the wide course.")
    ] = None,
) -> None:
    begin = time.time()
    shown = {} if photos is None else {split: read_photos(photos / split) for split in ("train", "validation")}
    trainer = Trainer(start, seed, device, compiled and device == "cuda", tokens, course, shown)
    model = trainer.model
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters", flush=True)
    print(f"{len(extra_fonts())} fonts beside Pillow's own, transformers {transformers.__version__}", flush=True)
    if device == "cuda" and not extra_fonts():
        raise typer.BadParameter("matplotlib is not installed; its fonts are needed for variety")
    if device == "cpu":
        print(f"fast path differs from the model by {check(trainer):.1e}", flush=True)
    first = seed * 10**12  # a run that goes on has a seed of its own, and sees other pictures
    stream = Stream(trainer.batcher, first, seconds)
    ahead = {"num_workers": workers, "prefetch_factor": 3 if workers else None}
    loader = iter(torch.utils.data.DataLoader(stream, batch_size=None, **ahead))
    held: list[dict[str, Any]] = []
    fill(held, Held(Batcher(trainer.tokenizer, tokens // 4, course, shown), "validation", 2), 2 if workers else 0)
    ready: queue.Queue[Any] = queue.Queue(maxsize=6)
    threading.Thread(target=bring, args=(trainer, loader, ready), daemon=True).start()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.05},
            {"params": [*others, trainer.dense], "weight_decay": 0.0},
        ],
        lr=rate, betas=(0.9, 0.98), fused=device == "cuda",
    )  # fmt: skip
    pool: list[list[Any]] = []  # batches on the device, and how often each may still be used
    rng = random.Random(seed)
    curve: list[dict[str, Any]] = []
    step, pictures, waited, last = 0, 0, 0.0, time.time()
    recent: list[torch.Tensor] = []
    model.train()
    trained_from = time.time()
    while (done := (time.time() - trained_from) / seconds) < 1:
        if len(pool) < 32:
            wait = time.time()
            pool.append([take(ready), reuse])
            waited += time.time() - wait
        place = rng.randrange(len(pool))
        batch = pool[place][0]
        pool[place][1] -= 1
        if pool[place][1] <= 0:
            pool.pop(place)
        if step == 0 and start is not None:  # not kept with the weights
            print(f"dense loss {trainer.settle(batch):.2f}, {trainer.dense.tolist()}", flush=True)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 400) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
        answer, dense = trainer.losses(batch)
        optimizer.zero_grad(set_to_none=True)
        (answer + 0.15 * dense).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(torch.stack([answer.detach(), dense.detach()]))
        step, pictures = step + 1, pictures + len(batch["kinds"])
        if step % 200 == 0 or step in (1, 20):
            answers, words = torch.stack(recent).mean(dim=0).tolist()
            recent.clear()
            entry = {"step": step, "seconds": round(time.time() - begin), "pictures": pictures,
                     "answer_loss": round(answers, 4), "dense_loss": round(words, 5)}  # fmt: skip
            curve.append(entry)
            print(entry, f"waited {waited:.0f} s", flush=True)
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
