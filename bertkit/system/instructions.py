"""The instruction set of the processor, as far as int8 matrix products depend on it."""

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
OTHER_SET = "other"
FLAGS = {  # flag in /proc/cpuinfo -> instruction set, the most capable first
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "avx512f": "avx512",
    "avx2": "avx2",
}


def find_instruction_set() -> str:
    """Return avx512_vnni, avx_vnni, avx512, avx2, or other, for processors without these and outside Linux."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return OTHER_SET
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return next((name for flag, name in FLAGS.items() if flag in flags), OTHER_SET)
