"""The tokenizer of an export, read without transformers, whose import takes longer than an answer.

It has what predictions use of a BertTokenizerFast. Left out: all other tokenizers (`bertkit.data.tokenizer`).
"""

from pathlib import Path
from typing import Any

from bertkit.data.formats.line import read_json
from bertkit.errors import as_usage_error

REMEDY = "export the run again"
READ = ("BertTokenizer", "BertTokenizerFast")


class SavedTokenizer:
    """A BERT tokenizer from the tokenizer.json and tokenizer_config.json that `save_tokenizer` writes."""

    is_fast = True
    model_input_names = ("input_ids", "token_type_ids", "attention_mask")

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        config = read_json(directory / "tokenizer_config.json", dict[str, Any], REMEDY)
        with as_usage_error(str(directory / "tokenizer.json"), REMEDY):
            self.backend_tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        for name in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"):
            token = config.get(name)
            setattr(self, name, token)
            setattr(self, f"{name}_id", None if token is None else self.backend_tokenizer.token_to_id(token))

    @classmethod
    def fits(cls, directory: Path) -> bool:
        """Return whether a directory has a tokenizer of this kind."""
        path = directory / "tokenizer_config.json"
        if not path.is_file() or not (directory / "tokenizer.json").is_file():
            return False
        return read_json(path, dict[str, Any], REMEDY).get("tokenizer_class") in READ

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Return the added tokens by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """Return the tokens with these ids."""
        return list(map(self.backend_tokenizer.id_to_token, ids))
