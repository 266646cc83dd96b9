"""The instruction set is read from the flags of the processor."""

import pytest

from bertkit.system import instructions


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx avx2 avx512f avx512_vnni", "avx512_vnni"),
        ("avx2 avx_vnni", "avx_vnni"),
        ("avx2 avx512f", "avx512"),
        ("avx avx2", "avx2"),
        ("fpu avx", "other"),
    ],
)
def test_the_most_capable_set_is_found(flags, expected, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: X\nflags\t\t: {flags}\n\nflags\t\t: other\n")
    monkeypatch.setattr(instructions, "CPU_INFO", tmp_path / "cpuinfo")
    assert instructions.find_instruction_set() == expected


def test_without_such_a_file_the_set_is_other(tmp_path, monkeypatch):
    monkeypatch.setattr(instructions, "CPU_INFO", tmp_path / "no")
    assert instructions.find_instruction_set() == instructions.OTHER_SET
