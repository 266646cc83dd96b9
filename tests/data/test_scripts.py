"""Scripts of texts."""

import re
from itertools import pairwise

import pytest

from bertkit.data.scripts import (
    close_characters,
    detect_scripts,
    is_chinese,
    list_rarer_forms,
    space_characters,
    split_terms,
)


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


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("a good film", ["a", "good", "film", "a good", "good film"]),
        ("很好看", ["很", "好", "看", "很 好", "好 看", "很 好 看"]),
        ("iphone很好", ["iphone", "很", "好", "iphone 很", "很 好"]),
        ("１９９８年", ["１９９８", "年", "１９９８ 年"]),
        ("猫です", ["猫", "で", "す", "猫 で", "で す", "猫 で す"]),
        ("ที่นี่", ["ที่", "นี่", "ที่ นี่"]),
        ("좋은 책", ["좋은", "책", "좋은 책"]),
        ("", []),
    ],
)
def test_characters_are_the_words_of_scripts_without_spaces(text, terms):
    assert split_terms(text) == terms


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("他 说 ： 很 好 ！", "他说：很好！"),
        ("用 iPhone 15 Pro 拍 的", "用iPhone 15 Pro拍的"),
        ("猫 です 。", "猫です。"),
        ("좋은 책 을", "좋은 책 을"),
        ("It is good .", "It is good ."),
    ],
)
def test_words_of_scripts_without_spaces_are_joined_as_they_are_written(words, text):
    assert close_characters(words) == text


@pytest.mark.parametrize(
    "text",
    ["It's the U.N.'s 2nd café!", "Я люблю кино, а ты?", "मैंने यह किताब पढ़ी।", "قرأت هذا الكتاب", "좋은 책을 읽었다"],
)
def test_scripts_with_spaces_have_words_and_pairs_of_words(text):
    words = re.findall(r"\w+|[^\w\s]", text)
    assert split_terms(text) == [*words, *map(" ".join, pairwise(words))]
    assert space_characters(text) == text


@pytest.mark.parametrize(
    ("texts", "kind", "rarer"),
    [
        (["1998年", "2024年", "１９９８年"], "other_width", "１"),
        (["１９９８年", "１年", "1年"], "other_width", "1"),
        (["１９９８年", "iPhone", "2"], "", ""),  # no character has both forms
        (["这国家", "这个", "這個國家"], "other_form", "國"),
        (["這國家", "這個", "这个国家"], "other_form", "国"),
        (["日本の国", "時間"], "", ""),
        ([], "", ""),
    ],
)
def test_the_rarer_form_is_looked_for_where_a_character_has_both(texts, kind, rarer):
    found = list_rarer_forms(lambda: [(text,) for text in texts])
    assert list(found) == ([kind] if kind else [])
    for form in found.values():
        assert form.search(rarer)
        assert not form.search(texts[0])
