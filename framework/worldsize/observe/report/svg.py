"""Charts as inline SVG in the page's own colours and fonts: the same in light, dark and print."""

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

WIDTH = 360  # units; a page column is about as many pixels wide, on a phone too
_VARIABLES = ("ink", "muted", "line", "good", "bad", *(f"c{n}" for n in range(1, 9)))
# colours that stand for variables of the page's style sheet until the chart is drawn
_SENTINELS = {name: f"#01{index:02x}fe" for index, name in enumerate(_VARIABLES)}
SERIES = 8  # colours that are told apart


def colour(name: str) -> str:
    """Colour that becomes the style sheet's variable ``name`` once the chart is drawn; KeyError if there is none."""
    return _SENTINELS[name]


def series_colour(index: int) -> str:
    """Colour of a series by its index from 0; it repeats after ``SERIES``."""
    return colour(f"c{index % SERIES + 1}")


@final
@dataclass(frozen=True)
class Chart:
    """A drawn chart with its texts.

    ``note`` says what the eye cannot know; ``key`` has labels and the style sheet's names of their colours.
    """

    title: str
    svg: Markup
    note: str = ""
    key: tuple[tuple[str, str], ...] = ()


def tip(artist: Artist, text: str) -> None:
    """Show ``text`` where the pointer rests on ``artist``."""
    artist.set_gid("tip:" + plain(text).encode().hex())


def plain(text: str, *, at_most: int = 60) -> str:
    """Return ``text`` shortened, with a sign in place of what fonts cannot show."""
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
        warnings.filterwarnings("ignore", "Glyph")  # the page's font is another one
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        paint(figure.add_subplot())
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    return themed(text.getvalue(), title)


_METADATA = ("Creator", "Date", "Format", "Type")


def _style() -> Any:
    """Return settings of matplotlib, whose own type for them is a list of all names."""
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
    """Turn matplotlib's file into an element of a page: variables for colours, no fonts, ids or prolog of its own."""
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
    """Rename the ids of clip paths and markers, so that no other chart of the page has them."""
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
