"""The frozen model as a teacher: where it looks when it is asked a question about a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from arr_coc.config import Introspect
from arr_coc.families.family import open_family
from arr_coc.inference.messages import make_inputs, make_messages
from arr_coc.knowing import hear
from arr_coc.prompting.first_look.introspection import check_introspection, introspect, layers_to_read
from arr_coc.prompting.prune import Pruning
from arr_coc.prompting.question import ChatTokens
from arr_coc.prompting.settings import Settings
from arr_coc.selectors.own_attention import OwnAttentionSelector

# Questions about one picture that are read at a time.
TOGETHER = 8


class Looked(NamedTuple):
    """Where a model looks, `[h, w]` in [0, 1]: while it reads all tokens, and while it reads them pooled."""

    whole: Tensor | None
    pooled: Tensor | None


class Teacher:
    """Reads a picture with questions, and says where it looks.

    Args:
        model (`PreTrainedModel`), processor (`ProcessorMixin`): the frozen base.
        whole (`bool`): whether it reads all tokens.
        pooled (`Introspect`): whether it reads them pooled, and through how many layers; `"auto"` is always.
    """

    def __init__(self, model: Any, processor: Any, whole: bool, pooled: Introspect) -> None:
        self.family, self.processor, self.whole, self.pooled = open_family(model), processor, whole, pooled
        self.settings = Settings(chat=ChatTokens.from_tokenizer(processor.tokenizer), on_error="raise")
        if whole:
            check_introspection(self.family, self.settings)
        if pooled != "off":
            check_introspection(self.family, self.settings, pooled)

    @torch.no_grad()
    def __call__(self, picture: Image.Image, questions: Sequence[str]) -> list[Looked]:
        """Where the model looks for each question."""
        looked: list[Looked] = []
        for first in range(0, len(questions), TOGETHER):
            looked += self._look(picture, questions[first : first + TOGETHER])
        return looked

    def _look(self, picture: Image.Image, questions: Sequence[str]) -> list[Looked]:
        target = self.family.target
        asked = [make_messages(picture, question) for question in questions]
        inputs = make_inputs(self.processor, asked, target.device, target.dtype)
        steps = Pruning(self.family, inputs, self.settings, OwnAttentionSelector())
        steps.read()
        steps.encode()
        read = (steps.family, inputs, steps.prompt, steps.positions, steps.encoded, self.settings.chat)
        spans, none = steps.prompt.spans, [None] * len(questions)
        whole = introspect(*read, small=lambda grid: grid) if self.whole else none
        pooled = none if self.pooled == "off" else introspect(*read, layers_to_read(self.family, self.pooled))
        return [
            Looked(*(None if paid is None else hear(paid.view(1, *span.grid))[0, 0].cpu() for paid in found))
            for span, *found in zip(spans, whole, pooled, strict=True)
        ]
