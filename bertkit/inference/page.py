"""The page to try a served model: a form for its head, the answers, and the model card."""

import re
from importlib.resources import files
from pathlib import Path

import bertkit
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from bertkit.model.checkpoint import find_file
from bertkit.reports.html import digest, make_environment
from bertkit.system.hub import CARD

CARD_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)  # YAML for the Hub


def render_page(predictor: Predictor, name: str, run: str, *, asks_token: bool) -> str:
    """Return the page's HTML; a page that asks for a token shows neither the model's name nor its card.

    Args:
        run: The run or checkpoint, whose card is shown.
    """
    environment = make_environment()
    environment.filters["digest"] = digest
    source = files("bertkit.inference").joinpath("serve.html.jinja").read_text(encoding="utf-8")
    sample, properties = predictor.sample, predictor.input_schema["properties"]
    return environment.from_string(source).render(
        name="bertkit" if asks_token else name,
        head=predictor.settings.head,
        version=bertkit.__version__,
        fields={field: kind for field, kind in properties.items() if field in sample or kind["type"] == "string"},
        sample=sample,
        asks_token=asks_token,
        card=None if asks_token else render_card(run),
    )


def render_card(run: str) -> str | None:
    """Return a model card as HTML without images; None if there is none. HTML in the card is shown as text."""
    from markdown_it import MarkdownIt

    try:
        path = find_file(run, CARD)
    except UsageError:  # no connection to the Hub
        return None
    if path is None:
        return None
    text = CARD_HEADER.sub("", Path(path).read_text(encoding="utf-8", errors="replace"))
    return MarkdownIt("commonmark", {"html": False}).enable("table").disable("image").render(text)
