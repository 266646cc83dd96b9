"""The tokenizer of an export, read without transformers, whose import takes longer than an answer.

It has what predictions use of a BertTokenizerFast. Left out: all other tokenizers (`bertkit.data.tokenizer`).
"""

from pathlib import Path
from typing import Any

from bertkit.data.formats.line import read_json
from bertkit.errors import as_usage_error

EXPORT_AGAIN = "export the run again"
BERT_TOKENIZERS = ("BertTokenizer", "BertTokenizerFast")
TOKEN_IDS = {  # attribute of a special token -> that of its id
    "pad_token": "pad_token_id",
    "unk_token": "unk_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "sep_token_id",
    "mask_token": "mask_token_id",
}


class SavedTokenizer:
    """A BERT tokenizer from the tokenizer.json and tokenizer_config.json that `save_tokenizer` writes."""

    is_fast = True

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        config = read_json(directory / "tokenizer_config.json", dict[str, Any], EXPORT_AGAIN)
        with as_usage_error(str(directory / "tokenizer.json"), EXPORT_AGAIN):
            self.backend_tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.model_input_names = config.get("model_input_names", ("input_ids", "token_type_ids", "attention_mask"))
        for name, token_id in TOKEN_IDS.items():
            token = config.get(name)
            setattr(self, name, token)
            setattr(self, token_id, None if token is None else self.backend_tokenizer.token_to_id(token))

    @classmethod
    def fits(cls, directory: Path) -> bool:
        """Return whether a directory has a tokenizer of this kind."""
        path = directory / "tokenizer_config.json"
        if not path.is_file() or not (directory / "tokenizer.json").is_file():
            return False
        config = read_json(path, dict[str, Any], EXPORT_AGAIN)
        # Earlier versions of transformers write a special token as an object.
        is_plain = all(isinstance(config.get(name), str | None) for name in TOKEN_IDS)
        return is_plain and config.get("tokenizer_class") in BERT_TOKENIZERS

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Return the added tokens by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """Return the tokens with these ids."""
        return list(map(self.backend_tokenizer.id_to_token, ids))
