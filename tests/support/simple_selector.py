"""A selector that any test can predict, and the settings under which tiny models are compared."""

import torch
from tiny_models import HIDDEN

from arr_coc import Selection, TokenSelector
from arr_coc.attending import resolve_budget
from arr_coc.selectors.per_picture import PerPictureSelector
from arr_coc.selectors.registry import _REGISTRY

GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "suppress_tokens": list(range(7))}
TOLERANCE = {"atol": 3e-5, "rtol": 1e-5}
# the methods of papers that choose for one picture at a time
PEERS = sorted(name for name, cls in _REGISTRY.items() if issubclass(cls, PerPictureSelector))


class ByScore(TokenSelector):
    """Keeps the tokens with the largest product with a fixed vector; `counts` gives each picture its own number."""

    def __init__(self, counts=None):
        self.direction = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))
        self.counts = counts

    def select(self, queries, budget=None):
        selections = []
        for place, query in enumerate(queries):
            total = query.tokens.shape[0]
            kept = self.counts[place] if self.counts else resolve_budget(budget or 0.25, total)
            score = query.tokens.float() @ self.direction.to(query.tokens.device)
            selections.append(Selection(indices=score.topk(min(kept, total)).indices.sort().values))
        return selections


def state_of(model):
    """Hooks, weights and attributes of a model, to see that nothing is left behind."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
    return hooks, sorted(model.state_dict()), sorted(model.__dict__)
