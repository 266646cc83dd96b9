"""Text -> WordPiece vocabulary -> tokenizer (paper §3, "Input/Output Representations": "WordPiece embeddings").

The reference code cleans the text, puts spaces around every Chinese character, lower-cases and strips accents if
uncased, splits at whitespace and around punctuation, and splits each word greedily into the longest pieces of the
vocabulary. `tokenizers` does all of this and trains the vocabulary. This module adds the choice of the alphabet, a
token order that is the same in every run, and reading and writing of the files.

Differs from the paper: its trainer was never published; that of `tokenizers` merges the most frequent pair of pieces.

Left out: the token ids of a corpus (`bertkit.data.pretraining.tokenize`).
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
from msgspec import Struct

from bertkit.data.formats.tables import read_json, read_lines
from bertkit.errors import UsageError, join_lines
from bertkit.system.hub import find_hub_trouble, is_hub_name
from bertkit.system.progress import ignore

if TYPE_CHECKING:
    from transformers import BertTokenizerFast

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST_WORD = 100  # characters; the tokenizer makes longer ones [UNK], as the reference code does
CHARACTER_COVERAGE = 0.9999  # share of a text's characters in the alphabet
MOST_WORDS = 2_000_000  # distinct words held in memory
CHARACTERS_A_COUNT = 20_000_000  # characters of text counted before its words are split at punctuation
LEAST_FREQUENCY = 2  # occurrences that a merged piece needs
REPEATS = 10_000  # repetitions of a word in one text passed to the trainer
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "vocab.txt"]
NORMALIZATION = {  # option of tokenizers' BertNormalizer -> option of transformers' BertTokenizerFast
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
}
LONGEST_TROUBLE = 200  # characters quoted from a library's message
UNKNOWN = "\U00013000"  # a hieroglyph that hardly any vocabulary contains
UNLIMITED = 1e9  # tokenizers without a maximum length store 1e30
TOKENIZER_REMEDY = "save the tokenizer again, or name a BERT tokenizer (WordPiece)"


class TokenizerModel(Struct):
    """The fields of `model` in tokenizer.json that are read."""

    vocab: dict[str, int]
    type: Literal["WordPiece"] = "WordPiece"


class TokenizerFile(Struct):
    """The fields of tokenizer.json that are read."""

    model: TokenizerModel
    normalizer: dict[str, Any] | None = None
    added_tokens: list[Any] | None = None


def train_vocabulary(
    texts: Iterable[str], *, size: int = 30522, cased: bool = False, report: Callable[[str], None] = ignore
) -> list[str]:
    """Train a WordPiece vocabulary and return its tokens in the order of their ids.

    The result depends only on the words and their counts. The special tokens come first, [PAD] at 0, then the alphabet,
    then its characters inside words (`##a`), then the merged pieces, the most frequent first; pieces that occur less
    than `LEAST_FREQUENCY` times are left out.

    The alphabet is the smallest set of characters that covers 99.99 % of the text, so that rare characters of foreign
    scripts do not use up the vocabulary. Words with a character outside the alphabet become [UNK], as do words longer
    than 100 characters, which are not counted; all other words can be represented.

    Args:
        size: Maximum number of tokens; there are fewer if the text does not give as many pieces.

    Raises:
        UsageError: `size` is smaller than the special tokens and the alphabet, or the texts have no words.
    """
    words = count_words(texts, cased=cased, report=report)
    alphabet = choose_alphabet(words)
    if not alphabet:
        raise UsageError("the texts have no words to train a vocabulary on; give a corpus with text")
    first = [*SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in alphabet if _continues(character))]
    if size < len(first):
        raise UsageError(
            f"a vocabulary of {size:,} tokens is too small: {len(alphabet):,} characters, alone and inside words, and "
            f"the special tokens need {len(first):,}; ask for at least that many (--size, vocab_size)"
        )
    known = set(alphabet)
    usable = {word: n for word, n in words.items() if known.issuperset(word)}
    tokens = _merge(usable, first, alphabet, size)
    if len(tokens) < size:
        report(f"the text yields {len(tokens):,} tokens, not {size:,}: no other piece occurs {LEAST_FREQUENCY} times")
    return tokens


def count_words(texts: Iterable[str], *, cased: bool, report: Callable[[str], None] = ignore) -> Counter[str]:
    """Count how often each word of at most 100 characters occurs, with words split as BERT's pre-tokenizer does.

    When there are more than MOST_WORDS distinct words, only the most frequent MOST_WORDS / 2 are kept and counting
    continues.
    """
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    normalizer, splitter = BertNormalizer(lowercase=not cased), BertPreTokenizer()
    words: Counter[str] = Counter()
    is_pruned = False
    texts = iter(texts)
    while unsplit := _count_unsplit(texts, normalizer):
        for word, count in unsplit.items():
            for piece, _ in splitter.pre_tokenize_str(word):
                if len(piece) <= LONGEST_WORD:
                    words[piece] += count
        if len(words) > MOST_WORDS:
            words = Counter(dict(words.most_common(MOST_WORDS // 2)))
            if not is_pruned:
                report(f"there are more than {MOST_WORDS:,} different words; the rarest are not counted")
            is_pruned = True
    return words


def _count_unsplit(texts: Iterator[str], normalizer: Any) -> Counter[str]:
    """Count the whitespace-separated strings in the next CHARACTERS_A_COUNT characters of the texts.

    The result is empty when the texts are exhausted.
    """
    unsplit: Counter[str] = Counter()
    characters = 0
    for text in texts:
        unsplit.update(normalizer.normalize_str(text).split())
        characters += len(text)
        if characters >= CHARACTERS_A_COUNT and unsplit:
            break
    return unsplit


def choose_alphabet(words: Counter[str]) -> list[str]:
    """Return the fewest characters that cover `CHARACTER_COVERAGE` of the words, sorted by code point."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    needed = CHARACTER_COVERAGE * counts.total()
    alphabet: list[str] = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if needed <= 0:
            break
        alphabet.append(character)
        needed -= count
    return sorted(alphabet)


def _continues(character: str) -> bool:
    """Return whether a character can continue a word; punctuation and Chinese characters are words by themselves."""
    return len(count_words([f"a{character}"], cased=True)) == 1


def _merge(words: dict[str, int], first: list[str], alphabet: list[str], size: int) -> list[str]:
    """Return `first` followed by the merged pieces.

    The trainer numbers the `##` characters in the order of a hash map that differs from run to run, and breaks ties
    between pairs by these numbers (tokenizers issue 1794). Passing them as special tokens fixes their numbers.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=LEAST_FREQUENCY,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_repeat(words), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def _repeat(words: dict[str, int]) -> Iterator[str]:
    """Yield texts in which each word occurs as often as it was counted, because the trainer takes no counts."""
    for word, count in words.items():
        for start in range(0, count, REPEATS):
            yield f"{word} " * min(REPEATS, count - start)


def make_tokenizer(tokens: Sequence[str], *, cased: bool, max_length: int = 512) -> "BertTokenizerFast":
    """Build a tokenizer whose token ids are the positions in `tokens`.

    Args:
        tokens: Distinct tokens, the special ones included.
    """
    from transformers import BertTokenizerFast

    ids = {token: index for index, token in enumerate(tokens)}
    return BertTokenizerFast(vocab=ids, do_lower_case=not cased, model_max_length=max_length)


def train_tokenizer(
    texts: Iterable[str], *, cased: bool = False, max_length: int = 512, **options: Any
) -> "BertTokenizerFast":
    """Return a tokenizer whose vocabulary is trained on the texts, with the `options` of `train_vocabulary`."""
    return make_tokenizer(train_vocabulary(texts, cased=cased, **options), cased=cased, max_length=max_length)


def save_tokenizer(tokenizer: "BertTokenizerFast", directory: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and vocab.txt, which transformers 5 does not write.

    The files are written to a hidden folder and moved once all are complete, vocab.txt last.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for key in ("is_local", "local_files_only", "auto_map"):  # its origin, and the remote code it would have run
        tokenizer.init_kwargs.pop(key, None)
    temporary = directory / ".tokenizer"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    temporary.mkdir()
    try:
        tokenizer.save_pretrained(temporary)
        ids = tokenizer.get_vocab()
        tokens = sorted(ids, key=ids.__getitem__)
        (temporary / "vocab.txt").write_bytes("".join(f"{token}\n" for token in tokens).encode())
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == "vocab.txt"):
            path.replace(directory / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_tokenizer(source: str | Path, *, cased: bool | None = None) -> "BertTokenizerFast":
    """Load a tokenizer from a directory with tokenizer.json or vocab.txt, a vocab.txt, or a model on the Hub.

    The files decide whether it is cased. If they do not say, `cased` decides; without it, the tokenizer is cased if a
    token has a capital letter. The maximum length comes from the files, with 512 as the default.

    Raises:
        UsageError: It does not exist, is not a BERT vocabulary, contradicts `cased`, or the Hub cannot be reached.
    """
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, it never fails
    if path.is_file():
        tokens = _read_tokens(path)
        _check_tokens(tokens, str(path))
        guess = _guess_cased(tokens)
        if cased and not guess and any(token.isascii() and token.isalpha() for token in tokens):
            raise UsageError(f"{path} has no capital letter, so it is uncased; do not request a cased one")
        return make_tokenizer(tokens, cased=guess if cased is None else cased)
    if path.is_dir():
        return _load_directory(path, str(path), cased)
    if not is_hub_name(str(source)):
        raise UsageError(
            f"{str(source)!r} does not exist; name a directory with tokenizer.json or vocab.txt, or a vocab.txt"
        )
    return _load_directory(_download(str(source)), str(source), cased)


def describe_vocabulary(tokenizer: "BertTokenizerFast") -> str:
    """Return a digest of vocabulary and normalizer; tokenizers with the same digest produce the same ids."""
    normalizer = json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"]
    return blake2b(json.dumps([sorted(tokenizer.get_vocab().items()), normalizer]).encode(), digest_size=16).hexdigest()


def _load_directory(directory: Path, source: str, cased: bool | None) -> "BertTokenizerFast":
    from transformers import BertTokenizerFast

    config, settings = {}, {}
    if (directory / "tokenizer_config.json").exists():
        config = read_json(directory / "tokenizer_config.json", dict[str, Any], TOKENIZER_REMEDY)
    if (directory / "tokenizer.json").exists():
        tokens, settings = _read_tokenizer_json(directory / "tokenizer.json")
    elif (directory / "vocab.txt").exists():
        tokens = _read_tokens(directory / "vocab.txt")
    else:
        raise UsageError(
            f"{source} has neither tokenizer.json nor vocab.txt; name a vocabulary or train one with bertkit vocab"
        )
    _check_tokens(tokens, source)
    settings |= {name: config[name] for name in NORMALIZATION.values() if config.get(name) is not None}
    if cased is not None and settings.get("do_lower_case") is cased:
        has, wants = ("uncased", "cased") if cased else ("cased", "uncased")
        raise UsageError(
            f"the tokenizer of {source} is {has}, but {wants} was requested; name a tokenizer that is {wants}"
        )
    settings.setdefault("do_lower_case", not (_guess_cased(tokens) if cased is None else cased))
    longest = config.get("model_max_length")
    if not isinstance(longest, int | float) or not 0 < longest < UNLIMITED:
        settings["model_max_length"] = 512
    try:
        tokenizer = BertTokenizerFast.from_pretrained(directory, **settings)
        tokenizer.backend_tokenizer.encode(UNKNOWN)  # fails if the unknown token is not in the vocabulary
    except Exception as error:  # tokenizers raises a plain Exception
        trouble = f"{type(error).__name__}: {join_lines(error)[:LONGEST_TROUBLE]}"
        raise UsageError(f"the tokenizer of {source} is damaged ({trouble!r}); save it again") from None
    needed = {name: getattr(tokenizer, name) for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
    if missing := [name for name, token in needed.items() if token is None]:
        raise UsageError(f"the tokenizer of {source} has no {missing[0]}; add it to its tokenizer_config.json")
    return tokenizer


def _download(name: str) -> Path:
    """Download a model's tokenizer files and return their folder; fall back to the cache if the Hub is unreachable."""
    from huggingface_hub import snapshot_download

    trouble = find_hub_trouble(name, "model")
    try:
        return Path(snapshot_download(name, allow_patterns=TOKENIZER_FILES, local_files_only=trouble is not None))
    except Exception as error:  # includes HTTP errors: huggingface_hub has changed its HTTP library more than once
        reason = trouble or f"the tokenizer of {name!r} cannot be downloaded ({join_lines(error)})"
        raise UsageError(f"{reason}; name a directory with a vocabulary or train one with bertkit vocab") from None


def _read_tokenizer_json(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the tokens in the order of their ids, and the settings that `BertTokenizerFast` takes from elsewhere.

    Without tokenizer_config.json, `BertTokenizerFast` lower-cases every text, whatever tokenizer.json says.
    """
    content = read_json(path, TokenizerFile, TOKENIZER_REMEDY)
    ids, normalizer = content.model.vocab, content.normalizer or {}
    # tokenizers stores every missing id: a single id of two billion would take 10 GB.
    most = len(ids) + len(content.added_tokens or [])
    if len(set(ids.values())) < len(ids) or not all(0 <= index < most for index in ids.values()):
        raise UsageError(f"{path} does not number its tokens from 0 without gaps; save the tokenizer again")
    settings = {name: normalizer[key] for key, name in NORMALIZATION.items() if key in normalizer}
    return sorted(ids, key=ids.__getitem__), settings


def _read_tokens(path: Path) -> list[str]:
    return [line.rstrip() for line in read_lines(path)]


def _check_tokens(tokens: Sequence[str], source: str) -> None:
    if missing := [token for token in SPECIAL_TOKENS if token not in tokens]:
        raise UsageError(
            f"{source} is not a BERT vocabulary: it has no {', '.join(missing)}; name a vocab.txt or its directory"
        )
    token, count = Counter(tokens).most_common(1)[0]
    if count > 1:
        raise UsageError(
            f"{source} has the token {token[:LONGEST_WORD]!r} {count} times, so later ids would shift; "
            "keep each token once"
        )


def _guess_cased(tokens: Iterable[str]) -> bool:
    """Return whether a token has a capital letter; tokens in brackets such as [UNK] and [unused1] do not count."""
    return any(token != token.lower() for token in tokens if not (token.startswith("[") and token.endswith("]")))


WORDS_REMEMBERED = 1 << 18  # entries of the cache; about 50 MB
_WORDS: WeakKeyDictionary[Any, tuple[int, "Words"]] = WeakKeyDictionary()


def copy_backend(tokenizer: Any) -> Any:
    """Return a copy of the underlying `tokenizers.Tokenizer` without padding and truncation.

    The caller's tokenizer is not changed. The copy treats special tokens written out in a text as ordinary text.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    return backend


def find_words(tokenizer: Any) -> "Words":
    """Return the `Words` of a tokenizer, made once as long as no tokens are added: a copy takes up to 20 ms."""
    size, words = _WORDS.get(tokenizer, (None, None))
    if size != len(tokenizer):
        words = Words(copy_backend(tokenizer))
        _WORDS[tokenizer] = len(tokenizer), words
    return words


class Words:
    """A tokenizer with a cache of words: most words occur again, and a lookup costs a fifth of tokenizing.

    Words are separated by spaces. This is exact, because nothing in BERT's normalizer and pre-tokenizer reaches across
    a space. For a vocabulary with added tokens that contain spaces, each text is tokenized as a whole.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.ids: dict[str, list[int]] = {}
        added = backend.get_added_tokens_decoder().values()
        self.separator = None if any(not token.special and " " in token.content for token in added) else " "

    def encode(self, texts: list[str], dtype: type[np.unsignedinteger]) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of all texts concatenated (N,), and the number of tokens of each text (S,) int64."""
        words = [text.split(self.separator) if self.separator else [text] for text in texts]
        if len(self.ids) > WORDS_REMEMBERED:
            self.ids.clear()
        new = list(set(chain.from_iterable(words)) - self.ids.keys())
        encodings = self.backend.encode_batch_fast(new, add_special_tokens=False)
        self.ids.update((word, encoding.ids) for word, encoding in zip(new, encodings, strict=True))
        look_up = self.ids.__getitem__
        found = [list(chain.from_iterable(map(look_up, line))) for line in words]
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        return np.fromiter(chain.from_iterable(found), dtype, lengths.sum()), lengths
