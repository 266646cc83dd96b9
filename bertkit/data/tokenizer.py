"""Text -> WordPiece vocabulary -> tokenizer (paper §3, "Input/Output Representations": "WordPiece embeddings").

The reference code cleans the text, puts spaces around every Chinese character, lower-cases and strips accents if
uncased, splits at whitespace and around punctuation, and splits each word greedily into the longest pieces of the
vocabulary. `tokenizers` does all of this and trains the vocabulary. This module adds the choice of the alphabet, a
token order that is the same in every run, and reading and writing of the files.

A checkpoint's tokenizer is what transformers' `AutoTokenizer` makes of its files; its code is never run.

Differs from the paper: its trainer was never published; that of `tokenizers` merges the most frequent pair of pieces.

Left out: the token ids of a corpus (`bertkit.data.pretraining.tokenize`).
"""

import json
import os
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import regex

from bertkit.data.formats.line import read_json, read_lines
from bertkit.errors import UsageError, join_lines
from bertkit.system.hub import explain_hub_trouble, parse_hub_name, split_revision
from bertkit.system.progress import Report, ignore

if TYPE_CHECKING:
    from transformers import BertTokenizerFast

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST_WORD = 100  # characters; the tokenizer makes longer ones [UNK], as the reference code does
CHARACTER_COVERAGE = 0.9999  # share of a text's characters in the alphabet
MOST_WORDS = 2_000_000  # distinct words held in memory
CHARACTERS_A_COUNT = 20_000_000  # characters of text counted before its words are split at punctuation
LEAST_FREQUENCY = 2  # occurrences that a merged piece needs
MARKED = regex.compile(r"\p{Lo}\p{Mc}*\p{Mn}+")  # lower-casing removes accents, and with them these marks
MARKED_SHARE = 0.001  # share of a text's characters above which marked letters are reported
REPEATS = 10_000  # repetitions of a word in one text passed to the trainer
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "vocab.txt"]  # the files that are written
OTHER_FILES = ["config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.model"]
CORE_TOKENS = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
NORMALIZATION = {  # option of tokenizers' BertNormalizer -> option of transformers' BertTokenizerFast
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
}
UNKNOWN = "\U00013000"  # a hieroglyph that hardly any vocabulary contains
BRACKETED = regex.compile(r"\[.*\]")
CAPITAL_SHARE = 0.03  # share of the tokens with letters that have capitals; bert-base-cased has 0.31
UNLIMITED = 1e9  # tokenizers without a maximum length store 1e30
TOKENIZER_REMEDY = (
    "save the tokenizer again, name a BERT tokenizer (WordPiece), or set tokenizer_class in tokenizer_config.json"
)


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
    """
    words = count_words(texts, cased=cased, report=report)
    alphabet = choose_alphabet(words)
    if not alphabet:
        raise UsageError("the texts have no words to train a vocabulary on; give a corpus with text")
    # Punctuation and Chinese characters are words by themselves.
    inner = [f"##{character}" for character in alphabet if len(count_words([f"a{character}"], cased=True)) == 1]
    first = [*SPECIAL_TOKENS, *alphabet, *inner]
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
    words, marked, characters, is_pruned = Counter[str](), Counter[str](), 0, False
    texts = iter(texts)
    while batch := list(_take(texts, CHARACTERS_A_COUNT)):
        characters += sum(map(len, batch))
        unsplit = Counter(chain.from_iterable(normalizer.normalize_str(text).split() for text in batch))
        for word, count in unsplit.items():
            for piece, _ in splitter.pre_tokenize_str(word):
                if len(piece) <= LONGEST_WORD:
                    words[piece] += count
        if len(words) > MOST_WORDS:
            words, is_pruned = Counter(dict(words.most_common(MOST_WORDS // 2))), True
        if not cased:
            marked.update(chain.from_iterable(MARKED.findall(unicodedata.normalize("NFD", text)) for text in batch))
    if is_pruned:
        report(f"there are more than {MOST_WORDS:,} different words; the rarest are not counted")
    if marked.total() > MARKED_SHARE * characters:
        report(
            f"lower-casing removes the marks of {marked.total():,} letters of scripts without case, such as "
            f"{marked.most_common(1)[0][0]}; keep them with --cased"
        )
    return words


def _take(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield the next texts until they have a number of characters."""
    while characters > 0 and (text := next(texts, None)) is not None:
        characters -= len(text)
        yield text


def choose_alphabet(words: Counter[str]) -> list[str]:
    """Return the fewest characters that cover `CHARACTER_COVERAGE` of the words, sorted by code point."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    needed, alphabet = CHARACTER_COVERAGE * counts.total(), []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if needed > 0:
            alphabet.append(character)
            needed -= count
    return sorted(alphabet)


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
    # The trainer takes no counts, so a word is in the text as often as it was counted.
    texts = (f"{word} " * min(REPEATS, n - start) for word, n in words.items() for start in range(0, n, REPEATS))
    tokenizer.train_from_iterator(texts, trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


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


def save_tokenizer(tokenizer: Any, directory: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and vocab.txt, which transformers 5 does not write.

    The files are written to a hidden folder and moved once all are complete, vocab.txt last.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for key in ("is_local", "local_files_only", "auto_map"):  # the origin of a tokenizer, and its remote code
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


def load_tokenizer(source: str | Path, *, cased: bool | None = None, report: Report = ignore) -> Any:
    """Load a tokenizer from a directory with tokenizer.json or vocab.txt, a vocab.txt, or a model on the Hub.

    The files decide whether it is cased. If they do not say, `cased` decides; without it, it is guessed from the tokens
    and reported. The maximum length comes from the files, with 512 as the default.
    """
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, it never fails
    if path.is_file():
        tokens = list(read_lines(path))
        _check_tokens(tokens, str(path))
        return make_tokenizer(tokens, cased=_guess_cased(tokens, path.name, report) if cased is None else cased)
    if path.is_dir():
        return _load_directory(path, str(path), cased, report)
    if parse_hub_name(str(source)) is None:
        raise UsageError(
            f"{str(source)!r} does not exist; name a directory with tokenizer.json or vocab.txt, or a vocab.txt"
        )
    return _load_directory(_download(str(source)), str(source), cased, report)


def describe_vocabulary(tokenizer: Any) -> str:
    """Return a digest of a tokenizer; tokenizers with the same digest produce the same ids."""
    return blake2b(get_backend(tokenizer, "a built corpus").to_str().encode(), digest_size=16).hexdigest()


def _load_directory(directory: Path, source: str, cased: bool | None, report: Report) -> Any:
    from transformers import AutoTokenizer, BertConfig, BertTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    config, model_config = (
        read_json(directory / name, dict[str, Any], TOKENIZER_REMEDY) if (directory / name).exists() else {}
        for name in ("tokenizer_config.json", "config.json")
    )
    name = str(config.get("tokenizer_class") or model_config.get("tokenizer_class") or "BertTokenizer")[:100]
    kind = tokenizer_class_from_name(name) or PreTrainedTokenizerFast  # as AutoTokenizer chooses
    code = config.get("auto_map")
    if code and (not isinstance(code, dict) or code.get("AutoTokenizer")):
        raise UsageError(f"the tokenizer of {source} is code of its own, which bertkit never runs; {TOKENIZER_REMEDY}")
    files = sorted(getattr(kind, "vocab_files_names", {}).values())
    if not any((directory / file).exists() for file in files):
        raise UsageError(
            f"{source} has neither {' nor '.join(files)}, which a {name!r} reads; "
            "name a vocabulary or train one with bertkit vocab"
        )
    is_plain = issubclass(kind, BertTokenizer)
    stock = BertConfig(tokenizer_class=model_config.get("tokenizer_class"))
    try:
        tokens, added, settings = _read_vocabulary(directory)
        settings = settings if is_plain else {}
        settings |= {name: config[name] for name in NORMALIZATION.values() if config.get(name) is not None}
        if cased is not None and settings.get("do_lower_case") is cased:
            has, wants = ("uncased", "cased") if cased else ("cased", "uncased")
            raise UsageError(
                f"the tokenizer of {source} is {has}, but {wants} was requested; name a tokenizer that is {wants}"
            )
        longest = config.get("model_max_length")
        if not isinstance(longest, int | float) or not 0 < longest < UNLIMITED:
            settings["model_max_length"] = 512
        if is_plain and "do_lower_case" not in settings:
            settings["do_lower_case"] = not (_guess_cased(tokens, source, report) if cased is None else cased)
        tokenizer = AutoTokenizer.from_pretrained(directory, config=stock, local_files_only=True, **settings)
        needed = {name: getattr(tokenizer, name) for name in CORE_TOKENS}
        if missing := [name for name in CORE_TOKENS[:4] if needed[name] is None]:
            raise UsageError(f"the tokenizer of {source} has no {missing[0]}; add it to its tokenizer_config.json")
        if is_plain:
            _check_tokens(tokens, source, [token for token in needed.values() if token and token not in added])
        _complete(tokenizer)
        get_cached_tokenizer(tokenizer).encode(
            [UNKNOWN], np.int64
        )  # fails if the unknown token is not in the vocabulary
        get_pair_template(tokenizer)
    except UsageError:
        raise
    except Exception as error:  # tokenizers raises a plain Exception
        trouble = f"{type(error).__name__}: {join_lines(error)}"
        remedy = "install that package" if isinstance(error, ImportError) else "save it again"
        raise UsageError(f"the tokenizer of {source} cannot be loaded ({trouble!r}); {remedy}") from None
    return tokenizer


def _read_vocabulary(directory: Path) -> tuple[list[str], Collection[str], dict[str, Any]]:
    """Return the tokens in the order of their ids, the added tokens, and settings of a `BertTokenizer`.

    Without tokenizer_config.json, `BertTokenizer` lower-cases every text, whatever tokenizer.json says.
    """
    if not (path := directory / "tokenizer.json").exists():
        lines = directory / "vocab.txt"
        tokens = list(read_lines(lines)) if lines.exists() else []
        return tokens, (), {"vocab": {token: index for index, token in enumerate(tokens)}}
    content = read_json(path, dict[str, Any], TOKENIZER_REMEDY)
    vocab, normalizer, added = content["model"]["vocab"], content.get("normalizer") or {}, content.get("added_tokens")
    ids = vocab if isinstance(vocab, dict) else {}
    added = {token["content"] for token in added or ()}
    settings = {name: normalizer[key] for key, name in NORMALIZATION.items() if key in normalizer}
    return sorted(ids, key=ids.__getitem__), added, settings


def _complete(tokenizer: Any) -> None:
    """Give a tokenizer whose files add no special tokens those that BERT reads, so that it is saved with them."""
    from tokenizers.processors import TemplateProcessing

    if tokenizer.is_fast and not tokenizer.backend_tokenizer.num_special_tokens_to_add(is_pair=False):
        cls, sep = tokenizer.cls_token, tokenizer.sep_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=[cls, "$A", sep],
            pair=[cls, "$A", sep, "$B:1", f"{sep}:1"],
            special_tokens=[(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)],
        )


def _download(source: str) -> Path:
    """Download a model's tokenizer files and return their folder; fall back to the cache if the Hub is unreachable."""
    from huggingface_hub import snapshot_download

    name, revision = split_revision(source)
    trouble = explain_hub_trouble(name, "model", revision)
    try:
        files = [*TOKENIZER_FILES, *OTHER_FILES]
        there = {"revision": revision, "local_files_only": trouble is not None}
        return Path(snapshot_download(name, allow_patterns=files, **there))
    except Exception as error:  # includes HTTP errors: huggingface_hub has changed its HTTP library more than once
        reason = trouble or f"the tokenizer of {source!r} cannot be downloaded ({join_lines(error)})"
        raise UsageError(f"{reason}; name a directory with a vocabulary or train one with bertkit vocab") from None


def _check_tokens(tokens: Sequence[str], source: str, needed: Sequence[str] = SPECIAL_TOKENS) -> None:
    if missing := [repr(token)[1:-1][:LONGEST_WORD] for token in needed if token not in tokens]:
        raise UsageError(
            f"{source} is not a BERT vocabulary: it has no {', '.join(missing)}; name a vocab.txt or its directory"
        )
    token, count = Counter(tokens).most_common(1)[0]
    if count > 1:
        raise UsageError(
            f"{source} has the token {token[:LONGEST_WORD]!r} {count} times, so later ids would shift; "
            "keep each token once"
        )


def _guess_cased(tokens: Iterable[str], source: str, report: Report) -> bool:
    """Guess whether a vocabulary is cased, and report it; tokens in brackets such as [UNK] and [unused1] do not count.

    Differs from stock, which lower-cases unless tokenizer_config.json forbids it: a text would lose all capitals of a
    cased vocabulary. A few are words that somebody appended to an uncased one.
    """
    words = [token for token in tokens if token.lower() != token.upper() and not BRACKETED.fullmatch(token)]
    capitals = sum(word != word.lower() for word in words)
    if capitals > CAPITAL_SHARE * len(words):
        report(f"loaded as cased: {source} has capital letters")
        return True
    report(f"loaded as uncased: {source} has {'few' if capitals else 'no'} capital letters")
    return False


WORDS_REMEMBERED = 1 << 18  # entries of the cache; about 50 MB
_WORDS: WeakKeyDictionary[Any, tuple[int, "CachedTokenizer"]] = WeakKeyDictionary()


def copy_backend(tokenizer: Any) -> Any:
    """Return a copy of the underlying `tokenizers.Tokenizer` without padding and truncation.

    The caller's tokenizer is not changed. The copy treats `CORE_TOKENS` written out in a text as ordinary text, and
    finds all other added tokens. A tokenizer in Python has no backend and is returned itself.
    """
    from tokenizers import Tokenizer

    if not tokenizer.is_fast:
        return tokenizer
    state, core = tokenizer.backend_tokenizer.to_str(), list_core(tokenizer)
    if any(token.special != (token.content in core) for token in tokenizer.added_tokens_decoder.values()):
        content = json.loads(state)
        for token in content["added_tokens"]:
            token["special"] = token["content"] in core
        state = json.dumps(content)
    backend = Tokenizer.from_str(state)
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    return backend


def list_core(tokenizer: Any) -> set[str]:
    """Return the tokens that are ordinary text where a text spells them: a tokenizer's own `CORE_TOKENS`."""
    return {token for name in CORE_TOKENS if (token := getattr(tokenizer, name))}


def get_backend(tokenizer: Any, use: str) -> Any:
    """Return the backend of `get_cached_tokenizer`, which says which characters each token has.

    Args:
        use: The use that needs it, for the message.
    """
    if not tokenizer.is_fast:
        raise UsageError(
            f"{use} needs a tokenizer.json, which gives the characters of each token; this tokenizer is a "
            f"{type(tokenizer).__name__}, which has none; name another checkpoint"
        )
    return get_cached_tokenizer(tokenizer).backend


class PairTemplate(NamedTuple):
    """How a tokenizer joins texts: the ids before, between and after them, and the token type of the second text."""

    before: list[int]
    between: list[int]
    after: list[int]
    second_type: int

    def count(self, texts: int) -> int:
        """Return the number of special tokens around one text or two."""
        return len(self.before) + len(self.after) + len(self.between) * (texts - 1)


def get_pair_template(tokenizer: Any) -> PairTemplate:
    """Return the form of a pair; for BERT [CLS], [SEP], [SEP] and 1, for others as their tokenizer.json says."""
    has_types = "token_type_ids" in tokenizer.model_input_names  # else plain transformers passes zeros
    cls, sep = [tokenizer.cls_token_id], [tokenizer.sep_token_id]
    if not tokenizer.is_fast:
        return PairTemplate(cls, sep, sep, int(has_types))
    backend = get_cached_tokenizer(tokenizer).backend
    alone, found = backend.encode("a").ids, backend.encode("a", "b")
    owners = found.sequence_ids
    first, second = owners.index(0), owners.index(1)
    between = [index for index in range(first, second) if owners[index] is None]
    after = len(owners) - owners[::-1].index(1)
    ids, types = found.ids, found.type_ids
    if (alone[:1], ids[:first], alone[-1:], ids[after:]) != (cls, cls, sep, sep):
        raise UsageError(
            "the tokenizer does not write a text as [CLS] text [SEP], which BERT reads; correct its tokenizer.json"
        )
    return PairTemplate(ids[:first], [ids[index] for index in between], ids[after:], types[second] if has_types else 0)


def get_cached_tokenizer(tokenizer: Any) -> "CachedTokenizer":
    """Return the cache of a tokenizer, made once as long as no tokens are added: a copy takes up to 20 ms."""
    size, words = _WORDS.get(tokenizer, (None, None))
    if size != len(tokenizer):
        words = CachedTokenizer(copy_backend(tokenizer))
        _WORDS[tokenizer] = len(tokenizer), words
    return words


class CachedTokenizer:
    """A tokenizer with a cache of words: most words occur again, and a lookup costs a fifth of tokenizing.

    Words are separated by spaces. This is exact, because nothing in BERT's normalizer and pre-tokenizer reaches across
    a space. With others, or with added tokens that contain spaces, each text is tokenized as a whole.
    """

    def __init__(self, backend: Any) -> None:
        from tokenizers.normalizers import BertNormalizer
        from tokenizers.pre_tokenizers import BertPreTokenizer

        self.backend = backend
        self.ids: dict[str, list[int]] = {}
        self.is_fast = hasattr(backend, "encode_batch_fast")
        self.separator = None
        if self.is_fast and isinstance(backend.normalizer, BertNormalizer):
            added = backend.get_added_tokens_decoder().values()
            if isinstance(backend.pre_tokenizer, BertPreTokenizer) and all(
                len(token.content.split()) == 1 for token in added
            ):
                self.separator = " "

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        if self.is_fast:
            return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        found = []
        for text in texts:
            for token in list_core(self.backend):
                text = text.replace(token, f"{token[:1]} {token[1:]}")  # ordinary text
            found.append(self.backend.convert_tokens_to_ids(self.backend.tokenize(text)))
        return found

    def encode(self, texts: list[str], dtype: type[np.unsignedinteger]) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of all texts concatenated (N,), and the number of tokens of each text (S,) int64."""
        words = [text.split(self.separator) if self.separator else [text] for text in texts]
        if len(self.ids) > WORDS_REMEMBERED or not self.separator:
            self.ids.clear()
        new = [word for word in set(chain.from_iterable(words)) if word not in self.ids]  # `-` would visit all keys
        self.ids.update(zip(new, self.tokenize(new), strict=True))
        look_up = self.ids.__getitem__
        found = [list(chain.from_iterable(map(look_up, line))) for line in words]
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        return np.fromiter(chain.from_iterable(found), dtype, lengths.sum()), lengths
