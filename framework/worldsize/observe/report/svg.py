"""Charts as inline SVG with the page's colors and fonts, for light and dark mode and print."""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, final

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
WIDTH = 360  # in units; about the width of a page column in pixels, also on a phone
SERIES = 8  # number of distinct colors
_LETTER = 5.6  # width of a letter at font size 10
_TOP, _RIGHT, _BOTTOM = 8, 10, 34  # margins
_STRIPS = 100  # maximum number of vertical strips with tooltips per chart
_SHOWN = 12  # maximum lines of a tooltip
_SCALE = np.array([(255, 255, 217), (199, 233, 180), (65, 182, 196), (34, 94, 168), (8, 29, 88)], dtype=float)


def format_colour(name: str) -> str:
    """Return an SVG attribute value for the color ``name`` of the style sheet."""
    return f"var(--{name})"


def series_colour(index: int) -> str:
    """Return the color of a series by its index from 0; colors repeat after ``SERIES``."""
    return format_colour(f"c{index % SERIES + 1}")


@final
@dataclass(frozen=True)
class Chart:
    """A drawn chart with title, note and legend.

    ``note`` explains the chart. ``key`` is the legend: labels, and color names in the style sheet.
    """

    title: str
    svg: Markup
    note: str = ""
    key: tuple[tuple[str, str], ...] = ()


def shorten_text(text: str, *, at_most: int = 60) -> str:
    """Shorten ``text``, and replace unprintable characters."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in text)
    return shown if len(shown) <= at_most else shown[: at_most - 1] + "…"


@final
@dataclass(frozen=True)
class Axis:
    """The range of an axis and its ticks.

    Attributes:
        label: Quantity or unit.
        is_log: Whether the axis is logarithmic.
        low: Lower end. None for the smallest value.
        high: Upper end. None for the largest value.
        ticks: Values with their labels. None for round numbers.
        margin: Margin at automatic ends, as a fraction of the axis.
    """

    label: str = ""
    is_log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: Sequence[tuple[float, str]] | None = None
    margin: float = 0.02

    def compute_ends(self, values: Numbers) -> tuple[float, float]:
        """Return the ends of the axis on its scale (exponents if logarithmic), including margins."""
        given = self.scale_values(np.array([each for each in (self.low, self.high) if each is not None]))
        shown = self.scale_values(values)
        shown = np.concatenate([shown[np.isfinite(shown)], given])
        low, high = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0)
        low = low if self.low is None else float(self.scale_values(np.array([self.low]))[0])
        high = high if self.high is None else float(self.scale_values(np.array([self.high]))[0])
        if not high > low:
            room = abs(low) / 2 or 0.5
            low, high = (low - room * (self.low is None), low + room)
        room = self.margin * (high - low)
        return low - room * (self.low is None), high + room * (self.high is None)

    def scale_values(self, values: Numbers) -> Numbers:
        """Return ``values`` on the scale of the axis; NaN for nonpositive values if logarithmic."""
        if not self.is_log:
            return values.astype(np.float64)
        return np.log10(np.where(values > 0, values, np.nan), dtype=np.float64)

    def compute_ticks(self, low: float, high: float, *, at_most: int) -> list[tuple[float, str]]:
        """Return positions on the scale and labels of the ticks between ``low`` and ``high``."""
        if self.ticks is not None:
            places = self.scale_values(np.array([value for value, _ in self.ticks], dtype=np.float64))
            return [(float(place), label) for place, (_, label) in zip(places, self.ticks, strict=True)]
        if self.is_log:
            steps = (1, 2, 5) if high - low < 2 else (1,)
            skip = max(1, math.ceil((high - low) / at_most))
            powers = range(math.floor(low), math.ceil(high) + 1, skip)
            values = [step * 10.0**power for power in powers for step in steps]
            return [(math.log10(value), f"{value:,g}") for value in values if low <= math.log10(value) <= high]
        raw = (high - low) / at_most
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * (1 - 1e-9))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [(number * step, f"{round(number * step, 12):,.10g}") for number in range(first, last + 1)]


Point = Literal["dot", "ring", "cross"]
_Mark = Callable[[Numbers, Numbers], str]  # from pixel coordinates


@final
class Plot:
    """A chart under construction: marks in data units, the last one on top."""

    def __init__(self, x: Axis, y: Axis, *, height: float = 210.0) -> None:
        self._x, self._y, self._height = x, y, height
        self._marks: list[tuple[Numbers, Numbers, _Mark]] = []
        self._series: list[tuple[str, Numbers, Numbers]] = []

    def add_line(
        self,
        x: Sequence[float] | Numbers,
        y: Sequence[float] | Numbers,
        colour: str,
        *,
        dash: str = "",
        width: float = 1.6,
    ) -> None:
        """Add a line with gaps at NaN."""

        def draw_line(x: Numbers, y: Numbers) -> str:
            points, words = zip(x, y, np.isfinite(x + y), strict=True), list[str]()
            is_begun = False
            for right, down, is_known in points:
                if is_known:
                    words.append(f"{'L' if is_begun else 'M'}{right:.1f} {down:.1f}")
                is_begun = bool(is_known)
            dashes = f' stroke-dasharray="{dash}"' if dash else ""
            return f'<path d="{"".join(words)}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashes}/>'

        self._add_mark(x, y, draw_line)

    def add_points(
        self,
        x: Sequence[float] | Numbers,
        y: Sequence[float] | Numbers,
        colour: str,
        *,
        tips: Sequence[str] = (),
        kind: Point = "dot",
    ) -> None:
        """Add a mark with a tooltip at each finite point."""

        def draw_points(x: Numbers, y: Numbers) -> str:
            texts = [*tips, *[""] * (len(x) - len(tips))]
            points = zip(x, y, texts, strict=True)
            return "".join(_format_point(kind, *each, colour) for each in points if np.isfinite(each[0] + each[1]))

        self._add_mark(x, y, draw_points)

    def add_area(
        self,
        x: Sequence[float] | Numbers,
        low: Numbers | Sequence[float],
        high: Numbers | Sequence[float],
        colour: str,
        *,
        tip: str = "",
    ) -> None:
        """Add the area between two lines; with two points, a bar; with one, a vertical line."""

        def draw_area(x: Numbers, y: Numbers) -> str:
            corners = " ".join(f"{right:.1f},{down:.1f}" for right, down in zip(x, y, strict=True))
            return f'<polygon points="{corners}" fill="{colour}">{_format_title(tip)}</polygon>'

        there, back = np.asarray(x, dtype=np.float64), np.asarray(high, dtype=np.float64)
        self._add_mark(
            np.concatenate([there, there[::-1]]),
            np.concatenate([np.asarray(low, dtype=np.float64), back[::-1]]),
            draw_area,
        )

    def add_image(
        self, values_rc: Numbers, low: float, high: float, *, extent: tuple[float, float, float, float]
    ) -> None:
        """Add a color map from ``low`` to ``high``; ``extent``: left, right, top, bottom."""

        def draw_image(x: Numbers, y: Numbers) -> str:
            data = b64encode(_encode_png(_map_colours((values_rc - low) / (high - low)))).decode()
            size = f'width="{x[1] - x[0]:.1f}" height="{y[1] - y[0]:.1f}" preserveAspectRatio="none"'
            place = f'x="{x[0]:.1f}" y="{y[0]:.1f}" style="image-rendering: pixelated"'
            return f'<image href="data:image/png;base64,{data}" {place} {size}/>'

        self._add_mark(extent[:2], extent[2:], draw_image)

    def add_cell(self, left: float, right: float, top: float, bottom: float, tip: str) -> None:
        """Add an invisible rectangle with a tooltip."""
        self._add_mark(
            (left, right), (top, bottom), lambda x, y: _format_strip(x[0], y.min(), x[1] - x[0], abs(y[1] - y[0]), tip)
        )

    def add_values(self, label: str, x: Sequence[float] | Numbers, y: Sequence[float] | Numbers) -> None:
        """Show a series in tooltips, together with other series at the same position."""
        known = np.isfinite(np.asarray(x, dtype=np.float64) + np.asarray(y, dtype=np.float64))
        self._series.append((label, np.asarray(x, dtype=np.float64)[known], np.asarray(y, dtype=np.float64)[known]))

    def _add_mark(self, x: Sequence[float] | Numbers, y: Sequence[float] | Numbers, drawn: _Mark) -> None:
        self._marks.append((np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64), drawn))

    def draw(self, title: str) -> Markup:
        """Return the ``svg`` element, which is deterministic for given data."""
        ends_x = self._x.compute_ends(np.concatenate([x for x, _, _ in self._marks] or [np.zeros(0)]))
        ends_y = self._y.compute_ends(np.concatenate([y for _, y, _ in self._marks] or [np.zeros(0)]))
        bottom, right = self._height - _BOTTOM, WIDTH - _RIGHT
        ticks_y = self._y.compute_ticks(*ends_y, at_most=max(2, int(bottom / 32)))
        left = 14 + _LETTER * max([len(label) for _, label in ticks_y], default=1) + (14 if self._y.label else 0)

        def place_x(values: Numbers) -> Numbers:
            return left + (self._x.scale_values(values) - ends_x[0]) / (ends_x[1] - ends_x[0]) * (right - left)

        def place_y(values: Numbers) -> Numbers:
            places = bottom - (self._y.scale_values(values) - ends_y[0]) / (ends_y[1] - ends_y[0]) * (bottom - _TOP)
            return np.clip(places, _TOP, bottom)

        parts = []
        for place, label in ticks_y:
            at = bottom - (place - ends_y[0]) / (ends_y[1] - ends_y[0]) * (bottom - _TOP)
            if _TOP - 1 <= at <= bottom + 1:
                parts.append(
                    f'<path d="M{left:.1f} {at:.1f}H{right}" stroke="{format_colour("line")}" stroke-width="0.5"/>'
                )
                parts.append(_format_text(left - 5, at + 3.5, label, anchor="end"))
        for place, label in self._x.compute_ticks(*ends_x, at_most=5):
            at = left + (place - ends_x[0]) / (ends_x[1] - ends_x[0]) * (right - left)
            parts.append(_format_text(at, bottom + 14, label, anchor="middle"))
        parts.append(f'<path d="M{left:.1f} {bottom}H{right}" stroke="{format_colour("line")}"/>')
        parts.append(_format_text((left + right) / 2, self._height - 5, self._x.label, anchor="middle"))
        if self._y.label:
            turned = f' transform="rotate(-90 10 {(_TOP + bottom) / 2:.1f})"'
            parts.append(_format_text(10, (_TOP + bottom) / 2, self._y.label, anchor="middle", more=turned))
        parts += [drawn(place_x(x), place_y(y)) for x, y, drawn in self._marks]
        parts += self._draw_strips(place_x, left, right, bottom)
        head = f'<svg viewBox="0 0 {WIDTH} {self._height:g}" role="img" aria-label="{escape(title)}" font-size="10">'
        return Markup(head + "".join(parts) + "</svg>")  # all text is escaped where it is added

    def _draw_strips(self, across: Callable[[Numbers], Numbers], left: float, right: float, bottom: float) -> list[str]:
        """Return invisible vertical strips with tooltips: the values of all series at the strip."""
        every = np.unique(np.concatenate([x for _, x, _ in self._series] or [np.zeros(0)]))
        if not every.size:
            return []
        shown = every[np.unique(np.linspace(0, len(every) - 1, min(len(every), _STRIPS)).round().astype(int))]
        places = across(shown)
        edges = [left, *((first + second) / 2 for first, second in pairwise(places)), right]
        strips = []
        for at, (begin, end) in zip(shown, pairwise(edges), strict=True):
            texts = []
            for label, x, y in self._series:
                nearest = int(np.abs(x - at).argmin()) if x.size else 0
                if x.size and begin - 1 <= across(x[nearest : nearest + 1])[0] <= end + 1:
                    texts.append(f"{label}: {y[nearest]:.6g}" if label else f"{y[nearest]:.6g}")
            more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
            tip = "\n".join([f"{self._x.label} {at:,.6g}", *texts[:_SHOWN], *more])
            strips.append(_format_strip(begin, _TOP, end - begin, bottom - _TOP, tip))
        return strips


def _format_title(text: str) -> str:
    lines = "\n".join(shorten_text(line, at_most=120) for line in text.split("\n"))
    return f"<title>{escape(lines)}</title>" if text else ""


def _format_text(x: float, y: float, text: str, *, anchor: str, more: str = "") -> str:
    fill = format_colour("muted")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{more}>{escape(text)}</text>'


def _format_strip(x: float, y: float, width: float, height: float, tip: str) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect class="value" {size}>{_format_title(tip)}</rect>'


def _format_point(kind: Point, x: float, y: float, tip: str, colour: str) -> str:
    if kind == "cross":
        d = f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"
        return f'<path d="{d}" stroke="{colour}" stroke-width="1.5" pointer-events="all">{_format_title(tip)}</path>'
    look = f'fill="{colour}"' if kind == "dot" else f'fill="none" stroke="{colour}" pointer-events="all"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{2.5 if kind == "dot" else 6}" {look}>{_format_title(tip)}</circle>'


def _map_colours(shares_rc: Numbers) -> NDArray[np.uint8]:
    """Return RGBA pixels (rows, columns, 4) for values from 0 to 1, transparent for NaN."""
    known, anchors = np.isfinite(shares_rc), np.linspace(0, 1, len(_SCALE))
    shares = np.clip(np.where(known, shares_rc, 0), 0, 1)
    channels = [np.interp(shares, anchors, _SCALE[:, channel]) for channel in range(3)]
    return np.stack([*channels, 255.0 * known], axis=-1).round().astype(np.uint8)


def _encode_png(pixels_rc4: NDArray[np.uint8]) -> bytes:
    """Encode pixels as a PNG file (www.w3.org/TR/png), without filters."""

    def encode_chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows, columns, _ = pixels_rc4.shape
    head = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels_rc4), 9)
    return b"\x89PNG\r\n\x1a\n" + encode_chunk(b"IHDR", head) + encode_chunk(b"IDAT", body) + encode_chunk(b"IEND", b"")
