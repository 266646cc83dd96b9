"""The scripts (writing systems) of texts, such as Latin or Cyrillic, by the script of each letter in Unicode.

A script without spaces, such as that of Chinese, Japanese or Thai, has characters where others have words. How a text
is divided for counting is decided here: `split_characters`, `split_terms` and `space_characters`.
"""

import re
import string
from collections.abc import Callable, Iterable
from itertools import chain, islice, pairwise

import numpy as np
import regex

ROWS_A_CHECK = 4096  # rows held in memory
SCRIPTS = (
    "Latin Cyrillic Greek Arabic Hebrew Devanagari Bengali Gurmukhi Gujarati Oriya Tamil Telugu Kannada Malayalam "
    "Sinhala Thai Lao Tibetan Myanmar Khmer Hangul Georgian Armenian Ethiopic Mongolian Thaana Syriac Cherokee"
)
JAPANESE = r"\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}"  # written beside each other, and counted as Han
NAMED = "|".join(rf"(?P<{name}>\p{{Script={name}}})" for name in SCRIPTS.split())
LETTER = regex.compile(rf"{NAMED}|(?P<Han>[{JAPANESE}])|(?P<other>\p{{L}})")
WORD_OR_CHARACTER = regex.compile(rf"(?V1)(\p{{Script=Han}})|[{JAPANESE}]|[\p{{L}}--[{JAPANESE}]]+")
TEXTS_ASKED = 1_000  # for `is_chinese`
# Characters that BERT's normalizer puts spaces around: each is a word.
IDEOGRAPH = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b73f"
    "\U0002b740-\U0002b81f\U0002b820-\U0002ceaf\U0002f800-\U0002fa1f"
)
# Scripts written without spaces: each character is a word, so any span of them fits. SA: Thai, Lao, Khmer, Burmese, …
UNSPACED = rf"{IDEOGRAPH}\p{{Hiragana}}\p{{Katakana}}\u30fc\uff70\p{{Tibetan}}\p{{lb=SA}}"
# The range from Thai on changes only the speed: a search of other text is six times as fast.
UNSPACED_CHARACTER = regex.compile(rf"(?V1)([[\u0e00-\U0010ffff]&&[{UNSPACED}]--\p{{M}}]\p{{M}}*)")
WORD_BORDER = rf"(?V1)\W+|(?<=[{UNSPACED}]\p{{M}}*)(?!\p{{M}})|(?=[[{UNSPACED}]--\p{{M}}])"
BETWEEN_UNSPACED = regex.compile(rf"(?V1)(?<=[{UNSPACED}]) | (?=[{UNSPACED}])")
TERM = re.compile(r"\w+|[^\w\s]")
ASCII = string.digits + string.ascii_letters
FORMS = {  # kind -> characters, and their other forms in the same order
    "other_width": (ASCII, "".join(chr(ord(character) + 0xFEE0) for character in ASCII)),
    # Frequent characters, each of which is only simplified or only traditional
    "other_form": (
        "这们国来个时会说对为没学过还样动种长问实开关点现经头进电书车东见买卖价钱质觉让讲给爱听认谢",
        "這們國來個時會說對為沒學過還樣動種長問實開關點現經頭進電書車東見買賣價錢質覺讓講給愛聽認謝",
    ),
}


def detect_scripts(rows: Iterable[Iterable[str]]) -> tuple[np.ndarray, list[str]]:
    """Return (S,) the script with the most letters in each row's texts, -1 without letters, and the scripts' names.

    The result numbers the names; scripts that few people write are `other`.
    """
    table = np.full(0x110000, -2, np.int16)  # character -> script; -1: none; -2: not asked yet
    names: dict[str, int] = {}
    texts, found = (" ".join(row) for row in rows), []
    while batch := list(islice(texts, ROWS_A_CHECK)):
        characters = np.frombuffer("".join(batch).encode("utf-32-le", "surrogatepass"), np.uint32)
        for character in np.unique(characters[table[characters] == -2]).tolist():
            letter = LETTER.match(chr(character))
            table[character] = names.setdefault(letter.lastgroup, len(names)) if letter else -1
        scripts, owners = table[characters], np.repeat(np.arange(len(batch)), list(map(len, batch)))
        is_letter, width = scripts >= 0, max(len(names), 1)
        cells = owners[is_letter] * width + scripts[is_letter]
        counts = np.bincount(cells, minlength=len(batch) * width).reshape(len(batch), width)
        found.append(np.where(counts.any(1), counts.argmax(1), -1))
    return np.concatenate(found) if found else np.empty(0, np.int64), list(names)


def is_chinese(texts: Iterable[str]) -> bool:
    """Guess from the first texts whether they are Chinese: most words, each kana being one, are Chinese characters."""
    # WORD_OR_CHARACTER finds an empty string unless it is Chinese.
    words = [word for text in islice(texts, TEXTS_ASKED) for word in WORD_OR_CHARACTER.findall(text)]
    return 2 * sum(map(bool, words)) > len(words)


# --- Terms ------------------------------------------------------------------------------------------------------------


def split_characters(text: str) -> list[str]:
    """Return the parts of a text, every second one a character of a script without spaces; others may be empty."""
    return UNSPACED_CHARACTER.split(text)


def split_terms(text: str) -> list[str]:
    """Return the words and pairs of words of a text; characters of scripts without spaces are words, also in threes."""
    parts = split_characters(text)
    words = TERM.findall(parts[0])
    for character, part in zip(parts[1::2], parts[2::2], strict=True):
        words += [character, *TERM.findall(part)]
    threes = zip(words, words[1:], words[2:], strict=False) if len(parts) > 1 else ()
    runs = (three for three in threes if all(map(UNSPACED_CHARACTER.match, three)))
    return [*words, *map(" ".join, chain(pairwise(words), runs))]


def space_characters(text: str) -> str:
    """Return a text with two spaces after each character of a script without spaces.

    A run of five characters then has one or two of them.
    """
    return UNSPACED_CHARACTER.sub(r"\1  ", text)


def close_characters(text: str) -> str:
    """Return words joined by spaces as people write them: without spaces around characters of a script without any."""
    return BETWEEN_UNSPACED.sub("", text)


# --- Two forms of one character ---------------------------------------------------------------------------------------


def list_rarer_forms(walk: Callable[[], Iterable[Iterable[str]]]) -> dict[str, re.Pattern[str]]:
    """Return a pattern of the rarer forms for each kind of FORMS of which the rows have both forms of a character."""
    seen, found = set[str](), {}
    for row in walk():
        seen.update(*row)
    for kind, sides in FORMS.items():
        both = list(filter(seen.issuperset, zip(*sides, strict=True)))
        if not both:
            continue
        usual, other = (re.compile(f"[{''.join(forms)}]") for forms in zip(*both, strict=True))
        rows_with_usual = sum(any(map(usual.search, row)) for row in walk())
        rows_with_other = sum(any(map(other.search, row)) for row in walk())
        found[kind] = other if rows_with_other <= rows_with_usual else usual
    return found
