"""Simulate several accelerators: CPU tensors that claim another device and refuse to be mixed.

Left out: the backward pass, for which torch asks the device itself.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FIRST, SECOND = torch.device("meta", 0), torch.device("meta", 1)


class Placed(Tensor):
    """Hold a CPU tensor, `value`, and report another device."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor, device: torch.device) -> "Placed":
        placed = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=device, requires_grad=False
        )
        placed.value = value
        return placed

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run(func, args, kwargs or {})


class Devices(TorchDispatchMode):
    """Allow tensors to be made on FIRST and SECOND."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operation on the CPU, and place its results where they would be.

    Raises:
        RuntimeError: its tensors lie on different devices.
    """
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    devices = {x.device for x in given if x.dim() or x.device.type != "cpu"} or {x.device for x in given}
    target = kwargs.get("device")
    if target is None and len(devices) > 1 and func is not torch.ops.aten.copy_.default:
        raise RuntimeError(f"expected all tensors of {func} on one device, got {sorted(map(str, devices))}")
    device = torch.device(target) if target is not None else next(iter(devices), torch.device("cpu"))
    known = {id(x.value): x for x in given if isinstance(x, Placed)}
    args, kwargs = tree_map(lambda x: x.value if isinstance(x, Placed) else x, (args, kwargs))
    results = func(*args, **(kwargs if target is None else kwargs | {"device": "cpu"}))

    def place(x: Any) -> Any:
        if not isinstance(x, Tensor) or device.type == "cpu":
            return x
        return known[id(x)] if id(x) in known else Placed(x, device)  # an operation in place gives what it was given

    return tree_map(place, results)


def place_module(module: nn.Module, device: torch.device) -> None:
    """Move a module's parameters to a device, and the tensors it is called with, by replacing its `forward`."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not isinstance(parameter, Placed):
                moved = nn.Parameter(Placed(parameter.detach(), device), requires_grad=False)
                owner.register_parameter(name, moved)

    forward = module.forward

    def move(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, (args, kwargs))
        return forward(*args, **kwargs)

    module.forward = move
