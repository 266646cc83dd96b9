"""Choose where a model runs, and in which precision.

Left out: several devices, which are accelerate's.
"""

import torch

from bertkit.errors import UsageError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_device() -> torch.device:
    """The accelerator, or the CPU if there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def choose_precision(asked: str) -> str:
    """fp32, bf16 or fp16; "auto" takes bf16 where it is faster.

    Elsewhere it is emulated and slow; and Intel's processors gain by AMX alone, for their AVX-512 form of such products
    takes longer than fp32 does.

    Raises:
        UsageError: fp16 without an accelerator.
    """
    if asked == "fp16" and not torch.accelerator.is_available():
        raise UsageError('precision = "fp16" needs an accelerator and there is none; use "auto", "bf16" or "fp32"')
    if asked != "auto":
        return asked
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if torch.backends.mps.is_available():
        return "fp32"
    capabilities = torch.cpu.get_capabilities()
    is_fast = capabilities.get("avx512_bf16") and "intel" not in capabilities.get("cpu_name", "").lower()
    return "bf16" if is_fast or capabilities.get("amx_bf16") else "fp32"


def use_precision(precision: str, device: torch.device) -> torch.autocast:
    """A context in which matrix products have that precision, as in training."""
    return torch.autocast(device.type, DTYPES.get(precision), enabled=precision in DTYPES)
