"""Scripts of texts."""

import pytest

from bertkit.data.scripts import find_scripts


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Ada lived in London", "Latin"),
        ("Ада жила в Лондоне", "Cyrillic"),
        ("Αδα", "Greek"),
        ("エイダはロンドンに住んでいた", "Han"),
        ("에이다", "Hangul"),
        ("Ada said да", "Latin"),
        ("12:30 – 😀", None),
        ("", None),
    ],
)
def test_a_text_has_the_script_of_most_letters(text, script):
    numbers, names = find_scripts([(text,)])
    assert (names[numbers[0]] if numbers[0] >= 0 else None) == script


def test_batches_number_scripts_alike():
    rows = [("Latin",)] * 5000 + [("кириллица",)] * 5000
    numbers, names = find_scripts(rows)
    assert [names[numbers[0]], names[numbers[-1]]] == ["Latin", "Cyrillic"]
    assert len(set(numbers[:5000])) == len(set(numbers[5000:])) == 1
