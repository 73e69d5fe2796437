"""Realizing: texture, knowing, balancing and attending in one layer that keeps the tokens a question needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from arr_coc.attending import Plan, TokenAllocator, finish_plan, resolve_budget
from arr_coc.balancing import SCORES, AdaptiveTensionBalancer, Balance, Judgement, Steering, steer
from arr_coc.config import UNTRAINED, ARRCOCConfig, Budget, Grid, Introspect, cell_count, check_grid
from arr_coc.gaze.compression import make_compressor
from arr_coc.knowing import InformationScorer, ParticipatoryScorer, PerspectivalScorer, focus_of, hear
from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.pixels.saliency import picture_structure
from arr_coc.runtime.cuda_graphs import GraphCache, may_replay
from arr_coc.runtime.hub import PretrainedModule
from arr_coc.runtime.validation import check_inputs, check_width, extremes, read_report, record_detector
from arr_coc.selectors.contract import Selection, TokenSelector, VisualQuery
from arr_coc.selectors.grouping import group_queries, pad_words
from arr_coc.selectors.output import ARRCOCOutput
from arr_coc.selectors.registry import register_selector
from arr_coc.texture import (
    CHANNELS,
    SEMANTIC_CHANNELS,
    PreviousFrame,
    TextDetector,
    blank_texture,
    picture_texture,
    put_semantic,
    semantic_channels,
    text_channel,
)

__all__ = ["ARRCOCLayer", "ARRCOCOutput"]

# Results on the device, before the host knows their lengths: scores [B, 3, t, h, w], balance, plan, texture
# [B, t, C, h, w], pull of each word [B, Q, t, h, w], smallest and largest values of the inputs.
_Results = tuple[Tensor, Balance, Plan, Tensor, Tensor, Tensor]

# Channels that decide whether a picture has structure: colour and busyness.
_STRUCTURE = {
    "core": ("red", "green", "blue", "sobel_magnitude", "local_variance"),
    "full": ("red", "green", "blue", "edges", "high_pass"),
}
# Share of the fixation history that is left after each frame.
FIXATION_FADE = 0.5
# Above this, kernel launches no longer dominate the time, and a recording would hold more than half a gigabyte.
MOST_REPLAYED_PIXELS = 4096 * 4096


@register_selector(UNTRAINED)
class ARRCOCLayer(PretrainedModule, TokenSelector):
    """Decide which parts of a picture deserve tokens, given the question.

    The initial weights are fixed: an untrained layer is a deterministic, training-free selector. It computes in float32
    also inside `torch.autocast`, which changes its choice only as far as it changes the tokens.

    On CUDA without gradients, the second call of a shape is recorded as a CUDA graph and later calls replay it, which
    is several times faster. A recording keeps its working memory (about 20 MB for a picture of one megapixel, 360 MB
    for twelve); `layer.use_graphs = False` turns recording off.

    Args:
        config (`ARRCOCConfig`): the layer's settings.
        text_detector (`Callable`, *optional*): fills the `text` channel; its name is recorded in the config.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import ARRCOCConfig, ARRCOCLayer
    >>> layer = ARRCOCLayer(ARRCOCConfig(hidden_size=64))
    >>> tokens, words = torch.randn(2, 12, 64), torch.randn(2, 5, 64)
    >>> output = layer(tokens, words, grid=(1, 3, 4), picture=torch.rand(2, 3, 96, 128), budget=4)
    >>> output.tokens.shape, output.positions.shape, output.relevance.shape
    (torch.Size([2, 4, 64]), torch.Size([2, 4, 3]), torch.Size([2, 1, 3, 4]))

    ```
    """

    ordered = True
    reads_question = True
    checked = True
    added = (
        *("balancer.following", "balancer.trust.weight"),
        *(f"steering.correction.{part}" for part in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")),
    )
    structure_channels: Tensor

    def __init__(self, config: ARRCOCConfig, text_detector: TextDetector | None = None) -> None:
        super().__init__()
        self.text_detector: TextDetector | None
        # never registered as a submodule: it is neither trained nor saved with the layer
        object.__setattr__(self, "text_detector", text_detector)
        self.config = record_detector(config, text_detector)
        self.project: nn.Linear | None = None
        with torch.random.fork_rng(devices=[]):  # leave the caller's random state alone
            if config.channels == "full":
                self.project = nn.Linear(config.hidden_size, SEMANTIC_CHANNELS, bias=False)
            self.information = InformationScorer(config)
            self.perspectival = PerspectivalScorer(config)
            self.participatory = ParticipatoryScorer(config)
            self.balancer = AdaptiveTensionBalancer(config)
            self.allocator = TokenAllocator(config)
            self.steering = Steering(config)
        table = CHANNELS[config.channels]
        structure = torch.tensor([table[name] for name in _STRUCTURE[config.channels]])
        self.register_buffer("structure_channels", structure, persistent=False)
        self.use_graphs = True
        self._graphs = GraphCache()
        self._initialise(config.seed)
        self.compressor = make_compressor(config)

    @property
    def default_budget(self) -> Budget:  # type: ignore[override]
        """The budget when a call gives none."""
        return self.config.budget

    @property
    def default_introspect(self) -> Introspect:  # type: ignore[override]
        """Whether the model is asked where it looks when a call does not say."""
        return self.config.introspect

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Fixed orthogonal projections; the last layer of each learned correction stays zero."""
        generator = torch.Generator("cpu").manual_seed(seed)
        last = (
            *(self.perspectival.correction[-1], self.balancer.correction[-1], self.balancer.trust),
            self.steering.correction[-1],
        )
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and module not in last:
                # drawn on the CPU, so that the weights are the same on any device
                weight = torch.empty(module.weight.shape, device="cpu")
                module.weight.copy_(nn.init.orthogonal_(weight, generator=generator))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move between devices, but stay in float32 when the surrounding model is cast."""

        def move(value: Tensor) -> Tensor:
            moved = fn(value)
            return moved if moved.dtype == value.dtype else value.to(moved.device)

        result: Self = super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return result

    def forward(
        self,
        tokens: Tensor,
        words: Tensor,
        *,
        grid: tuple[int, ...],
        cells: tuple[int, ...] | None = None,
        picture: Tensor | Mipmaps | None = None,
        word_mask: Tensor | None = None,
        attended: Tensor | None = None,
        budget: Budget | None = None,
        previous: PreviousFrame | None = None,
        details: bool = False,
        gather: bool = True,
        leeway: float = 1.0,
    ) -> ARRCOCOutput:
        """Select tokens of a batch of pictures (or clips) that share one grid.

        Args:
            tokens (`Tensor` of shape `[B, N, D]`): the encoder's merged tokens.
            words (`Tensor` of shape `[B, Q, D]`): embeddings of the query's words.
            grid (`tuple[int, ...]`): `(h, w)` or `(t, h, w)` of the tokens.
            cells (`tuple[int, ...]`, *optional*): the grid to score, if it is finer than that of the tokens.
            picture (`Tensor` of shape `[B, 3, H, W]` or `[B, t, 3, H, W]`, *optional*): in [0, 1]; or the
                mipmaps of as many stills.
            word_mask (`Tensor` of shape `[B, Q]`, *optional*): False for padding words.
            attended (`Tensor` of shape `[B, cells]`, *optional*): attention that the language model itself pays each
                cell when it is asked the question.
            budget (`int`, `float` or `"auto"`, *optional*): overrides the config's.
            previous (`PreviousFrame`, *optional*): from [`~ARRCOCLayer.remember`]; for single frames.
            details (`bool`, *optional*, defaults to `False`): return the texture and the pull of each word.
            gather (`bool`, *optional*, defaults to `True`): return the kept tokens, not only their indices.
            leeway (`float`, *optional*, defaults to 1.0): how many times more or fewer tokens than the budget may stay,
                as question and picture need; see [`~arr_coc.balancing.Steering`].
        """
        grid = check_grid(grid)
        cells = grid if cells is None else check_grid(cells, "cells")
        count = resolve_budget(self.config.budget if budget is None else budget, cell_count(cells))
        frames = check_inputs(self.config, tokens, words, grid, cells, picture, word_mask, previous, attended)
        resolved: Budget = "auto" if count is None else count
        settings = (grid, cells, resolved, previous, leeway)
        recordable = previous is None and self.text_detector is None and self.use_graphs
        pixels = frames.colour if isinstance(frames, Mipmaps) else frames
        small = pixels is None or pixels.numel() <= 3 * MOST_REPLAYED_PIXELS
        # in half precision near-equal cells would change places, so a caller's autocast ends here
        with torch.autocast(tokens.device.type, enabled=False):
            if small and recordable and may_replay(tokens):
                results = self._replay(tokens, words, word_mask, attended, frames, settings)
            else:
                results = self._compute(tokens, words, word_mask, attended, frames, *settings)
        scores, balance, plan, texture, pull, ends = results
        batch = tokens.shape[0]
        report = read_report(torch.cat([ends, plan.report.flatten()]), batch, frames is not None)
        plan = finish_plan(plan, report, cell_count(cells))

        kept = None
        if cells == grid and gather:
            kept = tokens.gather(1, plan.indices[:, :, None].expand(-1, -1, tokens.shape[-1]))
            kept = kept * (straight_through(plan.budgets) * plan.mask)[:, :, None].to(kept.dtype)
        return ARRCOCOutput(
            tokens=kept,
            indices=plan.indices,
            mask=plan.mask,
            budgets=plan.budgets,
            num_kept=torch.tensor([int(row[0]) for row in report]),
            expected_tokens=plan.expected,
            relevance=balance.relevance,
            scores=dict(zip(SCORES, scores.unbind(dim=1), strict=True)),
            weights=balance.weights,
            tensions=balance.tensions,
            strategy=plan.strategy,
            reason=plan.reason,
            texture=texture if details else None,
            word_pull=pull[:, : words.shape[1]] if details else None,
            voice=None if attended is None else hear(attended.view_as(balance.relevance)),
        )

    def _replay(
        self,
        tokens: Tensor,
        words: Tensor,
        word_mask: Tensor | None,
        attended: Tensor | None,
        frames: Tensor | Mipmaps | None,
        settings: tuple[Any, ...],
    ) -> _Results:
        """[`_compute`] through the cache of CUDA graphs."""
        weights = tuple(parameter.data_ptr() for parameter in self.parameters())
        inputs = (tokens, *pad_words(words, word_mask), attended)
        if not isinstance(frames, Mipmaps):
            from_frames: _Results = self._graphs(self._compute, (*inputs, frames), (*settings, weights))
            return from_frames
        count = len(frames.tensors)

        # a recording takes tensors alone: the mipmaps are taken apart and put together again inside it
        def compute(tokens: Tensor, words: Tensor, mask: Tensor, attended: Tensor | None, *rest: Any) -> _Results:
            return self._compute(tokens, words, mask, attended, frames.with_tensors(rest[:count]), *rest[count + 2 :])

        sizes = (frames.level, frames.size)
        from_mipmaps: _Results = self._graphs(compute, (*inputs, *frames.tensors), (*sizes, *settings, weights))
        return from_mipmaps

    def _compute(
        self,
        tokens: Tensor,
        words: Tensor,
        word_mask: Tensor | None,
        attended: Tensor | None,
        frames: Tensor | Mipmaps | None,
        grid: Grid,
        cells: Grid,
        budget: Budget,
        previous: PreviousFrame | None,
        leeway: float,
        weights: object = None,
    ) -> _Results:
        """Everything that needs no transfer to the host; `weights` only tells recordings apart."""
        batch = tokens.shape[0]
        texture = self.read_texture(tokens, grid, cells, frames, previous)
        information, perspectival, participation, balance = self.judge(
            texture, tokens, words, grid, word_mask, attended
        )
        by_frame = texture.view(batch, cells[0], -1, cells[1], cells[2])  # [B, t, C, h, w]
        with torch.no_grad():
            structure = None
            if frames is not None:
                busy = texture.index_select(1, self.structure_channels)  # [B * t, 5, h, w]
                structure = picture_structure(busy).view(batch, -1).amax(dim=1)  # [B]
            # [B, t, C, h, w] -> [B, N, C]
            features = tokens if cells == grid else by_frame.transpose(1, 2).flatten(2).mT
            visited = None
            if previous is not None and previous.fixations is not None:
                visited = previous.fixations.flatten(1) > 0
            ends = extremes(tokens, words, balance.relevance, frames)
            text = text_channel(by_frame, self.config.channels, cells != grid)
        focus = None if attended is None else focus_of(attended)
        if leeway != 1:
            known = participation.match.new_zeros(batch) if focus is None else focus
            moved = self.steering(self.steering.describe(balance.context, known, cell_count(cells)))
            balance = balance._replace(tensions=steer(balance.tensions, moved))
        plan = self.allocator.plan(
            balance.relevance, features, balance.tensions, budget, structure, participation.match, visited, text,
            focus, leeway,
        )  # fmt: skip
        scores = torch.stack([information, perspectival, participation.score], dim=1)
        return scores, balance, plan, by_frame, participation.pull, ends

    def judge(
        self,
        texture: Tensor,
        tokens: Tensor,
        words: Tensor,
        grid: Grid,
        word_mask: Tensor | None = None,
        attended: Tensor | None = None,
    ) -> Judgement:
        """Score and balance a texture `[B * t, C, h, w]`: all learned weights but the semantic projection act here."""
        shape = (tokens.shape[0], -1, *texture.shape[2:])
        information = self.information(texture).view(shape)
        perspectival = self.perspectival(texture).view(shape)
        participation = self.participatory(texture, tokens, words, grid, word_mask)
        voice = None if attended is None else hear(attended.view(shape))
        balance = self.balancer(information, perspectival, participation, voice)
        return Judgement(information, perspectival, participation, balance)

    def project_again(self, texture: Tensor, tokens: Tensor, grid: Grid) -> Tensor:
        """A stored texture `[B * t, C, h, w]` with semantic channels from the current projection."""
        size = (texture.shape[2], texture.shape[3])
        return put_semantic(texture, self._semantic(tokens, grid, size), self.config.channels)

    def _semantic(self, tokens: Tensor, grid: Grid, size: tuple[int, int]) -> Tensor | None:
        return None if self.project is None else semantic_channels(self.project.weight, tokens, grid, size)

    def read_texture(
        self,
        tokens: Tensor,
        grid: Grid,
        cells: Grid,
        frames: Tensor | Mipmaps | None,
        previous: PreviousFrame | None = None,
    ) -> Tensor:
        """Texture `[B * t, C, h, w]` in float32 of frames `[B * t, 3, H, W]` or mipmaps, or of the tokens alone."""
        semantic = self._semantic(tokens, grid, (cells[1], cells[2]))
        if frames is None:
            return blank_texture(self.config, tokens.shape[0], cells, semantic, tokens.device)
        return picture_texture(self.config, frames, cells, semantic, previous, self.text_detector)

    def check(self, queries: Sequence[VisualQuery]) -> None:
        """Raise if the model has another width than the layer."""
        check_width(self.config, queries)

    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Select tokens of pictures of any sizes."""
        selections: dict[int, Selection] = {}
        for place, output in self.outputs(queries, budget):
            gate = straight_through(output.budgets[0]) if output.budgets.requires_grad else None
            selections[place] = Selection(indices=output.indices[0], gate=gate, output=output)
        return [selections[place] for place in range(len(queries))]

    def outputs(
        self, queries: Sequence[VisualQuery], budget: Budget | None = None
    ) -> Iterator[tuple[int, ARRCOCOutput]]:
        """Yield the index and the output of each query; queries of one size are processed as a batch."""
        for places, inputs in group_queries(queries):
            output = self(**inputs, budget=budget, gather=False)
            for row, place in enumerate(places):
                yield place, output.picture(row)

    def remember(self, output: ARRCOCOutput, picture: Tensor, previous: PreviousFrame | None = None) -> PreviousFrame:
        """Memory of this frame for the next frame of a stream.

        Example:

        ```python
        >>> import torch
        >>> from arr_coc import ARRCOCConfig, ARRCOCLayer
        >>> layer = ARRCOCLayer(ARRCOCConfig(hidden_size=64))
        >>> tokens, words, frame = torch.randn(1, 12, 64), torch.randn(1, 5, 64), torch.rand(1, 3, 96, 128)
        >>> memory = layer.remember(layer(tokens, words, grid=(3, 4), picture=frame), frame)
        >>> layer(tokens, words, grid=(3, 4), picture=frame.flip(-1), previous=memory).relevance.shape
        torch.Size([1, 1, 3, 4])

        ```
        """
        kept = output.kept_mask()[:, -1]
        fixations = kept.float()
        age = torch.ones_like(fixations)
        if previous is not None and previous.age is not None:
            age = previous.age + 1
        if previous is not None and previous.fixations is not None:
            fixations = torch.maximum(fixations, previous.fixations * FIXATION_FADE)
        frame = picture[:, -1] if picture.ndim == 5 else picture
        return PreviousFrame(frame, output.relevance[:, -1].detach(), age.masked_fill(kept, 0.0), fixations)


def straight_through(relevance: Tensor) -> Tensor:
    """Straight-through gate: exactly 1 in value, with the gradient of the relevance."""
    return relevance - relevance.detach() + 1
