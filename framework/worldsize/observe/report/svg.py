"""Charts as inline SVG in the page's own colours and fonts, for light, dark and print."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final
from zlib import crc32

from markupsafe import Markup, escape

from worldsize.errors import WorldsizeError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

WIDTH = 360  # units; about the width of a page column in pixels, also on a phone
_VARIABLES = ("ink", "muted", "line", "good", "bad", *(f"c{n}" for n in range(1, 9)))
# placeholder colours, replaced by variables of the style sheet once the chart is drawn
_SENTINELS = {name: f"#01{index:02x}fe" for index, name in enumerate(_VARIABLES)}
SERIES = 8  # colours that are told apart


def colour(name: str) -> str:
    """Return the placeholder of the style sheet's colour ``name``; raise KeyError if there is none."""
    return _SENTINELS[name]


def series_colour(index: int) -> str:
    """Return the colour of a series by its index from 0; colours repeat after ``SERIES``."""
    return colour(f"c{index % SERIES + 1}")


@final
@dataclass(frozen=True)
class Chart:
    """A drawn chart with its texts.

    ``note`` explains the chart; ``key`` has labels and the style sheet's names of their colours.
    """

    title: str
    svg: Markup
    note: str = ""
    key: tuple[tuple[str, str], ...] = ()


def tip(artist: Artist, text: str) -> None:
    """Show ``text`` when the pointer rests on ``artist``."""
    artist.set_gid("tip:" + plain(text).encode().hex())


def plain(text: str, *, at_most: int = 60) -> str:
    """Return ``text`` shortened, with characters replaced that fonts lack."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in text)
    return shown if len(shown) <= at_most else shown[: at_most - 1] + "…"


def draw(title: str, paint: Callable[[Axes], None], *, height: float = 210.0) -> Markup:
    """Draw the axes that ``paint`` fills as an ``svg`` element, the same for the same data.

    Raises:
        WorldsizeError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise WorldsizeError(
            "the report's charts are drawn by matplotlib, which is not installed. pip install 'worldsize[report]'"
        ) from None
    text = io.StringIO()
    with mpl.rc_context(_style()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the page has another font
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        paint(figure.add_subplot())
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    return themed(text.getvalue(), title)


_METADATA = ("Creator", "Date", "Format", "Type")


def _style() -> Any:
    """Return matplotlib's settings; its own type for them is a list of all names."""
    ink, muted, line = map(colour, ("ink", "muted", "line"))
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "worldsize",
        "text.parse_math": False,
        "font.size": 10.0,
        "text.color": ink,
        "axes.edgecolor": line,
        "axes.labelcolor": muted,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
        "grid.color": line,
        "grid.linewidth": 0.5,
        "xtick.color": line,
        "ytick.color": line,
        "xtick.labelcolor": muted,
        "ytick.labelcolor": muted,
        "lines.linewidth": 1.6,
        "patch.linewidth": 0.0,
    }


def themed(svg: str, title: str) -> Markup:
    """Convert matplotlib's file to a page element, with colour variables and without fonts, ids and prolog."""
    body = svg[svg.index("<svg") :]
    view = re.search(r'viewBox="[^"]*"', body)
    assert view is not None
    name = escape(title)
    body = re.sub(r"<svg[^>]*>", f'<svg {view[0]} role="img" aria-label="{name}">', body, count=1, flags=re.DOTALL)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", body)
    body = re.sub(r'<g id="tip:([0-9a-f]*)">', _with_title, body)
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    for variable, sentinel in _SENTINELS.items():
        body = body.replace(sentinel, f"var(--{variable})")
    return Markup(_own_ids(body, prefix=f"c{crc32(title.encode()):x}"))  # matplotlib has escaped all text


def _with_title(match: re.Match[str]) -> str:
    return f"<g><title>{escape(bytes.fromhex(match[1]).decode())}</title>"


def _own_ids(svg: str, *, prefix: str) -> str:
    """Make the ids of clip paths and markers unique on the page."""
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
