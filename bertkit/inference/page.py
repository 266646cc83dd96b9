"""The page to try a served model: a form for its head, the answers, and the model card.

It loads nothing, and its Content-Security-Policy allows only its own script and style. Left out: the drawing of
answers, which the script of the template does.
"""

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import bertkit
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from bertkit.model.checkpoint import find_file
from bertkit.reports.html import digest, make_environment
from bertkit.system.hub import CARD
from bertkit.tasks.pretraining import MASK

SERVE_TEMPLATE = "serve.html.jinja"
CARD_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)  # YAML for the Hub
TEXT_CELLS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def render_page(predictor: Predictor, name: str, place: str, sample: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the page's HTML and its Content-Security-Policy.

    Args:
        name: The model's name.
        place: The run or checkpoint, whose card is shown.
        sample: The input in the form at first; None makes the page that asks for the token and shows nothing else.
    """
    source = files("bertkit.inference").joinpath(SERVE_TEMPLATE).read_text(encoding="utf-8")
    template = make_environment().from_string(source)
    fields = [
        {"name": field, "is_list": kind["type"] == "array", "is_needed": field in predictor.sample}
        for field, kind in predictor.input_schema["properties"].items()
        if field in predictor.sample or kind["type"] == "string"
    ]
    has_masks = "masks" in predictor.output_schema["properties"]
    page = template.render(
        name=name,
        head=predictor.settings.head,
        version=bertkit.__version__,
        fields=fields,
        sample=sample,
        mask=MASK if has_masks else "",
        card=None if sample is None else render_card(place),
    )
    digests = {kind: f"'sha256-{digest(text)}'" for kind, text in TEXT_CELLS.findall(page)}
    policy = (
        f"default-src 'none'; script-src {digests['script']}; style-src {digests['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def render_card(place: str) -> str | None:
    """Return a model card as HTML without images; None if there is none. HTML in the card is shown as text."""
    from markdown_it import MarkdownIt

    try:
        path = find_file(place, CARD)
    except UsageError:  # no connection to the Hub
        return None
    if path is None:
        return None
    text = CARD_HEADER.sub("", Path(path).read_text(encoding="utf-8", errors="replace"))
    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    return reader.render(text)
