"""The scripts (writing systems) of texts, such as Latin or Cyrillic, by the script of each letter in Unicode."""

from collections.abc import Iterable
from itertools import islice

import numpy as np
import regex

from bertkit.data.duplicates import ROWS_A_CHECK

SCRIPTS = (
    "Latin Cyrillic Greek Arabic Hebrew Devanagari Bengali Gurmukhi Gujarati Oriya Tamil Telugu Kannada Malayalam "
    "Sinhala Thai Lao Tibetan Myanmar Khmer Hangul Georgian Armenian Ethiopic Mongolian Thaana Syriac Cherokee"
)
JAPANESE = r"\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}"  # written beside each other, and counted as Han
NAMED = "|".join(rf"(?P<{name}>\p{{Script={name}}})" for name in SCRIPTS.split())
LETTER = regex.compile(rf"{NAMED}|(?P<Han>[{JAPANESE}])|(?P<other>\p{{L}})")
WORD_OR_CHARACTER = regex.compile(rf"(?V1)(\p{{Script=Han}})|[{JAPANESE}]|[\p{{L}}--[{JAPANESE}]]+")
TEXTS_ASKED = 1_000  # for `is_chinese`


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
