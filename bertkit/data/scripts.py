"""The scripts (writing systems) of texts, such as Latin or Cyrillic, by the script of each letter in Unicode."""

from collections.abc import Iterable
from itertools import islice

import numpy as np

from bertkit.data.duplicates import ROWS_A_CHECK

COMMON = ("Zyyy", "Zinh", "Zzzz")  # punctuation, digits, combining marks, unassigned
JAPANESE = ("Hira", "Kana")  # written beside Han, and counted with it


def find_scripts(rows: Iterable[Iterable[str]]) -> tuple[np.ndarray, list[str]]:
    """Return (S,) the script with the most letters in each row's texts, -1 without letters, and the scripts' names.

    The result numbers the names.
    """
    from fontTools import unicodedata

    table = np.full(0x110000, -2, np.int16)  # character -> script; -1: none; -2: not asked yet
    codes: dict[str, int] = {}
    texts, found = (" ".join(row) for row in rows), []
    while batch := list(islice(texts, ROWS_A_CHECK)):
        characters = np.frombuffer("".join(batch).encode("utf-32-le", "surrogatepass"), np.uint32)
        for character in np.unique(characters[table[characters] == -2]).tolist():
            script = unicodedata.script(chr(character))
            script = "Hani" if script in JAPANESE else script
            table[character] = -1 if script in COMMON else codes.setdefault(script, len(codes))
        scripts, owners = table[characters], np.repeat(np.arange(len(batch)), list(map(len, batch)))
        is_letter, width = scripts >= 0, max(len(codes), 1)
        places = owners[is_letter] * width + scripts[is_letter]
        counts = np.bincount(places, minlength=len(batch) * width).reshape(len(batch), width)
        found.append(np.where(counts.any(1), counts.argmax(1), -1))
    names = [unicodedata.script_name(code).replace("_", " ") for code in codes]
    return np.concatenate(found) if found else np.empty(0, np.int64), names
