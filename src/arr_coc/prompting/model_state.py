"""Whether what a module made before is what it would make now: the same weights and adapters, and nothing beside."""

from __future__ import annotations

from torch import nn

from arr_coc.families.recordable import State, read_state

# Hooks of this module collect outputs and change nothing. They stay for good once hidden states were asked for.
_LISTENERS = "transformers.utils.output_capturing"


def read_model_state(root: nn.Module) -> State:
    """What the results of a module depend on besides its inputs, or why that cannot be known.

    As [`~arr_coc.families.recordable.read_state`], but hooks by which transformers collects outputs are no obstacle.

    Example:

    ```python
    >>> from torch import nn
    >>> from arr_coc.prompting.model_state import read_model_state
    >>> module = nn.Linear(2, 2).eval()
    >>> before = read_model_state(module)
    >>> module.weight = nn.Parameter(module.weight.detach().clone())
    >>> before == read_model_state(module), read_model_state(module.train()).obstacle
    (False, 'it is in training mode')

    ```
    """
    state = read_state(root)
    if state.obstacle is None:
        return state
    adapters = []
    for module in root.modules():
        part = read_state(module)
        if part.obstacle is None:
            adapters.append(part.adapters)
        elif not _is_only_listened_to(module):
            return part
    weights = tuple(tensor.data_ptr() for tensor in (*root.parameters(), *root.buffers()))
    return State(None, weights, tuple(adapters))


def _is_only_listened_to(module: nn.Module) -> bool:
    """Whether transformers collects outputs of a module or of its parts, and nobody does anything to itself."""
    own = vars(module)
    hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
    if not own["_modules"] and not hooks:
        return False  # something else about it
    signs = ("_hf_hook", "_compiled_call_impl", "forward", "_active_adapter")
    changed = module.training or any(own.get(name) is not None for name in signs)
    return not changed and all(getattr(hook, "__module__", None) == _LISTENERS for hook in hooks)
