"""Scripts of texts."""

import pytest

from bertkit.data.scripts import detect_scripts, is_chinese


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Ada lived in London", "Latin"),
        ("Ада жила в Лондоне", "Cyrillic"),
        ("エイダはロンドンに住んでいた", "Han"),
        ("Ada said да", "Latin"),
        ("12:30 – 😀", None),
    ],
)
def test_a_text_has_the_script_of_most_letters(text, script):
    numbers, names = detect_scripts([(text,)])
    assert (names[numbers[0]] if numbers[0] >= 0 else None) == script


def test_batches_number_scripts_alike():
    rows = [("Latin",)] * 5000 + [("кириллица",)] * 5000
    numbers, names = detect_scripts(rows)
    assert [names[numbers[0]], names[numbers[-1]]] == ["Latin", "Cyrillic"]
    assert len(set(numbers[:5000])) == len(set(numbers[5000:])) == 1


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["今天是教师节，小明送给了母亲一份特殊的节日礼物"], True),
        (["谷歌的BERT模型在SQuAD 1.1上的F1是93.2。", "BERT is a model."], True),
        (["今日は教師の日で、明さんは母に特別な贈り物をした"], False),
        (["BERT (变换器) is a model by Google."], False),
        (["1, 2, 3"], False),
    ],
)
def test_chinese_is_told_from_japanese_and_from_texts_that_quote_it(texts, expected):
    assert is_chinese(texts) == expected
