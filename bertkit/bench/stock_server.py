"""Serve the pipeline of plain transformers behind FastAPI, as its users do: the other side of `bertkit bench serve`.

    python -m bertkit.bench.stock_server RUN PORT threads|loop fp32|bf16

`threads` answers requests in the thread pool of FastAPI (`def`), `loop` one after the other (`async def`).
"""

import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import pipeline

from bertkit.model.precision import DTYPES


class Given(BaseModel):
    """An input."""

    text: str


def make_stock_app(run: str, kind: str, precision: str) -> FastAPI:
    """Return the application."""
    classify = pipeline("text-classification", model=run, top_k=None, dtype=DTYPES.get(precision, torch.float32))
    app = FastAPI()

    def answer(given: Given) -> Any:
        return classify(given.text, truncation=True)

    async def answer_in_turn(given: Given) -> Any:
        return answer(given)

    app.post("/predict")(answer if kind == "threads" else answer_in_turn)
    return app


if __name__ == "__main__":
    run, port, kind, precision = sys.argv[1:]
    uvicorn.run(make_stock_app(run, kind, precision), port=int(port), log_level="critical", access_log=False)
