"""Pages of one HTML file that load nothing from elsewhere: the inspector's and the benchmark's.

They share a layout, a style and the libraries that draw (D3 and Observable Plot, in ``pages``). Values reach the
scripts as JSON in which no ``<`` is left, and the content-security policy lets only the page's own scripts run.
"""

import secrets
from pathlib import Path
from typing import Any

import jinja2

FOLDER = Path(__file__).with_name("pages")


def render(name: str, data: dict[str, Any], **values: Any) -> str:
    """The page of the template ``pages/NAME.html`` and the script ``pages/NAME.js``, which draws ``data``."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    scripts = [(FOLDER / file).read_text("utf-8") for file in ("d3.min.js", "plot.min.js", "page.js", f"{name}.js")]
    style, nonce = (FOLDER / "style.css").read_text("utf-8"), secrets.token_urlsafe(16)
    return environment.get_template(f"{name}.html").render(
        data=data, scripts=scripts, style=style, nonce=nonce, **values
    )
