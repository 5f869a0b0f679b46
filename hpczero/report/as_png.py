"""A drawing as PNG, for slides: painted twice as large as asked, then made smaller, by Pillow."""

import io
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from hpczero.errors import InputError
from hpczero.report.marks import (
    COLOURS,
    Area,
    Cells,
    Dot,
    Drawing,
    Line,
    Mark,
    Place,
    Rectangle,
    Words,
)
from hpczero.text import printable

WIDTH = 1920  # pixels
_FINER = 2
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def png(drawing: Drawing) -> bytes:
    """Return the file; InputError where Pillow lacks."""
    image_of, draw_of, font_of = _pillow()
    scale = WIDTH * _FINER / drawing.width
    size = WIDTH * _FINER, round(drawing.height * scale)
    image = image_of.new("RGB", size, COLOURS["page"][0])
    painter = _Painter(draw_of.Draw(image, "RGBA"), font_of, scale)
    for mark in drawing.marks:
        painter.paint(mark)
    small = image.resize((WIDTH, size[1] // _FINER), image_of.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "PNG", optimize=True)
    return file.getvalue()


def refuse_without_pillow() -> None:
    _pillow()


def _pillow() -> tuple[Any, Any, Any]:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise InputError(
            "--png needs Pillow, which is not installed: pip install 'hpczero[report]'"
        ) from error
    return Image, ImageDraw, ImageFont


class _Painter:
    def __init__(self, draw: Any, fonts: Any, scale: float) -> None:
        self._draw = draw
        self._fonts = fonts
        self._scale = scale

    def paint(self, mark: Mark) -> None:
        match mark:
            case Rectangle():
                self._rectangle(mark.x, mark.y, mark.width, mark.height, mark.fill)
            case Cells():
                for cell in mark.places:
                    self._rectangle(*cell, mark.fill)
            case Line():
                self._line(mark)
            case Area():
                colour = *_rgb(mark.fill), round(255 * mark.opacity)
                if len(mark.points) > 1:
                    self._draw.polygon(self._scaled(mark.points), fill=colour)
            case Dot():
                x, y, radius = (v * self._scale for v in (mark.x, mark.y, mark.radius))
                box = (x - radius, y - radius, x + radius, y + radius)
                self._draw.ellipse(box, fill=_rgb(mark.fill))
            case Words():
                font = self._fonts.load_default(mark.size * self._scale)
                place = mark.x * self._scale, mark.y * self._scale
                text = printable(mark.text, 200)
                anchor = _ANCHORS[mark.anchor]
                self._draw.text(place, text, fill=_rgb(mark.fill), font=font, anchor=anchor)

    def _rectangle(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        if width > 0 and height > 0:
            places = self._scaled([(x, y), (x + width, y + height)])
            self._draw.rectangle(places, fill=_rgb(fill))

    def _line(self, line: Line) -> None:
        width = max(1, round(line.width * self._scale))
        for points in _dashed(line.points, line.dashes):
            scaled = self._scaled(points)
            self._draw.line(scaled, fill=_rgb(line.stroke), width=width, joint="curve")

    def _scaled(self, points: Sequence[Place]) -> list[Place]:
        return [(x * self._scale, y * self._scale) for x, y in points]


def _dashed(points: Sequence[Place], dashes: str) -> Iterator[Sequence[Place]]:
    """Yield the parts of a line that are drawn; Pillow knows no dashes."""
    lengths = [float(word) for word in dashes.split()]
    if not lengths:
        yield points
        return
    number, left = 0, lengths[0]
    for (x, y), (to_x, to_y) in pairwise(points):
        length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        done = 0.0
        while done < length:
            step = min(left, length - done)
            begin, end = done / length, (done + step) / length
            if number % 2 == 0:
                yield [(x + (to_x - x) * share, y + (to_y - y) * share) for share in (begin, end)]
            done += step
            left -= step
            if left <= 0:
                number += 1
                left = lengths[number % len(lengths)]


def _rgb(name: str) -> tuple[int, int, int]:
    colour = COLOURS[name][0]
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
