"""Many questions about one picture or clip: it is processed and encoded once, and each question chooses its own tokens.

What a prompt has in common with the one before, from its beginning on, is not read again: its keys and values are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from arr_coc.families.family import Family
from arr_coc.inference.messages import Message, PictureLike, check_messages, check_question, make_messages
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.layout import read_prompt
from arr_coc.prompting.prefix import Prefix
from arr_coc.prompting.resize import restate_prompt

if TYPE_CHECKING:
    from arr_coc.inference.answer import Answer
    from arr_coc.inference.vlm import ARRCOCQwen


class Conversation:
    """Questions about the same pictures; [`ARRCOCQwen.look`] starts one.

    Each question continues from the keys and values of the one before as far as both prompts begin in the same way, if
    that is at least an eighth of the prompt: the text before the picture, in mode `saccade` also the gestalt if
    saccades do not replace any of it, in mode `full` everything but the new question. After a change of the language
    model's adapters, with beam search, for example, and with models that have linear attention, the whole prompt is
    read. The encoder must stay as it is meanwhile.

    Args:
        vlm (`ARRCOCQwen`): answers them.
        pictures (a path, a `PIL.Image.Image`, an array `[H, W, 3]` of bytes, a clip, or several of them): what they
            are about; a clip is given as in [`ARRCOCQwen.answer`].
        remember (`bool`, *optional*, defaults to `True`): keep earlier questions and answers in the prompt; otherwise
            each question is asked by itself.

    Example:

    ```python
    >>> from importlib.resources import files
    >>> from arr_coc import ARRCOCQwen
    >>> vlm = ARRCOCQwen.from_pretrained()
    >>> page = vlm.look(files("arr_coc") / "assets" / "examples" / "page.png", remember=False)
    >>> [page.ask(question).text for question in ("what is the total?", "which total is written here?")]
    ['$20.10', '$20.10']
    >>> page.encoder_calls
    1

    ```
    """

    def __init__(
        self, vlm: ARRCOCQwen, pictures: PictureLike | Message | Iterable[PictureLike | Message], remember: bool = True
    ) -> None:
        opened = make_messages(pictures, "?")  # opens the pictures; the question is not used
        if len(opened) != 1:
            raise ValueError("`look` takes pictures or clips, got messages; pass messages to `answer`")
        check_messages(opened, vlm.processor)
        self._pictures = opened[0]["content"][:-1]
        self.vlm, self.remember = vlm, remember
        self.turns: list[Message] = []
        self._encodings: dict[bool, Encodings] = {}  # saccades see pictures at another resolution

    @property
    def encoder_calls(self) -> int:
        """How often the vision encoder ran."""
        return sum(encodings.calls for encodings in self._encodings.values())

    @property
    def tokens_read(self) -> int:
        """How many tokens of prompts the language model read; what earlier prompts began with is not read again."""
        return sum(prefix.tokens_read for encodings in self._encodings.values() if (prefix := encodings.prefix))

    def ask(self, question: str, *, mode: Any = None, **options: Any) -> Answer:
        """Answer a question.

        Args:
            question (`str`): about the pictures.
            mode, options: as in [`ARRCOCQwen.answer`].
        """
        check_question(question)
        before = self.turns if self.remember else []
        shown = [] if before else self._pictures
        turn = {"role": "user", "content": [*shown, {"type": "text", "text": question}]}
        usual = self.vlm.choose_mode(mode, options.get("budget"))
        native = self.vlm.fit_mode(usual, self._pictures) == "saccade"
        if native not in self._encodings:
            self._encodings[native] = Encodings()
            self._encodings[native].prefix = Prefix()
        encoded = self._encodings[native]
        answer = self.vlm.answer([*before, turn], mode=mode, encoded=encoded, **options)
        self.turns = [*before, turn, {"role": "assistant", "content": [{"type": "text", "text": answer.text}]}]
        return answer


def share_pixels(family: Family, inputs: dict[str, Any], encoded: Encodings) -> dict[str, Any]:
    """The inputs with pixels that were processed for an earlier question, of which the prompt shows small copies."""
    kinds = family.present(inputs)
    if not encoded.pixels:
        encoded.check_source(family, inputs)  # before they are kept
        names = [name for kind in kinds for name in (family.pixel_names[kind], f"{kind}_grid_thw")]
        encoded.pixels = {name: inputs[name] for name in names if name in inputs}
        return inputs
    prompt = read_prompt(family, inputs)
    grids = [grid for kind in kinds for grid in family.grids(encoded.pixels, kind)]
    return {**restate_prompt(family, inputs, prompt, grids), **encoded.pixels}
