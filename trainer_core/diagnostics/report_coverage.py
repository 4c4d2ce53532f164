"""The report's section on coverage: the picture that the run left, and what no gradient reached."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path

from .report_html import esc

_SHOWN = 12

log = logging.getLogger(__name__)


def coverage_html(folder: Path) -> str:
    """The section, empty where the run left no coverage (`coverage_check.py`)."""
    picture, facts = folder / "coverage.svg", folder / "coverage.json"
    try:
        drawing = base64.b64encode(picture.read_bytes()).decode("ascii")
        data = json.loads(facts.read_text(encoding="utf-8"))
        unreached = {str(name): str(reason) for name, reason in data["unreached"].items()}
        table = str(data["text"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        log.warning("the coverage of the run cannot be shown: %s", error)
        return f"<p>The coverage of this run cannot be read: {esc(error)}</p>"
    # As a picture and not inline: whatever is in the file, it cannot do anything in the page.
    figure = (
        f'<figure><img alt="which parts of the model learn" src="data:image/svg+xml;base64,{drawing}" '
        'style="max-width:100%"></figure>'
    )
    names = "".join(f"<li>{esc(name)}: {esc(reason)}</li>" for name, reason in list(unreached.items())[:_SHOWN])
    more = f"<li>and {len(unreached) - _SHOWN} more</li>" if len(unreached) > _SHOWN else ""
    missed = f"<p>Adapters without a gradient in the probe:</p><ul>{names}{more}</ul>" if unreached else ""
    return f"{figure}{missed}<details><summary>All blocks</summary><pre>{esc(table)}</pre></details>"
