"""The model card of a run."""

import json

from huggingface_hub import ModelCard

from bertkit.run import run
from bertkit.tasks import TASKS
from tests.tasks.test_conformance import make_pretraining


def test_the_card_says_what_it_is_how_to_load_it_and_how_to_repeat_it(tmp_path):
    run(TASKS["pretrain"], make_pretraining(tmp_path), output=tmp_path / "my-bert")
    card = ModelCard.load(tmp_path / "my-bert" / "README.md")
    assert card.data.library_name == "transformers"
    assert set(card.data.tags) == {"bert", "bertkit", "pretrain"}
    assert "from transformers import BertForPreTraining" in card.text
    metrics = json.loads((tmp_path / "my-bert" / "metrics.json").read_text())
    assert f"| masked-LM loss | {metrics['mlm_loss']:.4f} |" in card.text
    assert "hidden_size = 16" in card.text
    assert "torch 2" in card.text
