"""Choose the device and the precision of a model.

Left out: several devices, which accelerate manages.
"""

import torch
from torch import nn

from bertkit.errors import UsageError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device() -> torch.device:
    """Return the accelerator, or the CPU if there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def choose_precision(asked: str) -> str:
    """Return fp32, bf16 or fp16, resolving "auto".

    "auto" takes bf16 where it is faster, fp16 on CUDA without bf16, else fp32. Emulated bf16 is slow. Intel processors
    gain only with AMX: their AVX-512 matrix products in bf16 are slower than in fp32.
    """
    if asked == "fp16" and not torch.accelerator.is_available():
        raise UsageError('precision = "fp16" needs an accelerator, but none was found; use "auto", "bf16" or "fp32"')
    if asked != "auto":
        return asked
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if torch.backends.mps.is_available():
        return "fp32"
    capabilities = torch.cpu.get_capabilities()
    is_fast = capabilities.get("avx512_bf16") and "intel" not in capabilities.get("cpu_name", "").lower()
    return "bf16" if is_fast or capabilities.get("amx_bf16") else "fp32"


def cast_weights(model: nn.Module, precision: str) -> None:
    """Cast the weights of linear layers to a 16-bit precision, which autocast would repeat in every forward pass.

    Results under `use_precision` stay the same. A weight that is also an embedding stays in fp32, and so does the layer
    of a single number, which `use_precision` leaves in fp32.
    """
    if precision in DTYPES:
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.out_features > 1 and id(module.weight) not in tables:
                module.to(DTYPES[precision])


def use_precision(precision: str, device: torch.device) -> torch.autocast:
    """Return the autocast context of a precision, as used in training."""
    return torch.autocast(device.type, DTYPES.get(precision), enabled=precision in DTYPES)
