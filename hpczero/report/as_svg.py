"""A drawing as SVG, for a page or a file of its own.

Words are escaped by the XML library. Nothing in it can run, and it refers to nothing outside.
"""

from collections.abc import Iterable
from xml.etree import ElementTree

from hpczero.report.marks import COLOURS, Area, Cells, Dot, Drawing, Line, Mark, Rectangle, Words
from hpczero.text import printable

_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"


def inline(drawing: Drawing, identity: str) -> str:
    """Return the element for a page, whose parts have the identity in their names."""
    return ElementTree.tostring(_element(drawing, identity), encoding="unicode")


def whole_file(drawing: Drawing) -> str:
    """Return a file of its own, on a page of its colour; dark where the reader's surface is."""
    root = _element(drawing, "drawing")
    root.attrib |= {"width": _number(drawing.width), "height": _number(drawing.height)}
    style = ElementTree.Element("style")
    style.text = style_of_colours(":root")
    root.insert(2, style)
    root.insert(3, _of_mark(Rectangle(0, 0, drawing.width, drawing.height, "page")))
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def style_of_colours(selector: str) -> str:
    """Return the style sheet with the colours: light, dark, and light again on paper."""
    light, dark = (
        "".join(f"--{name}:{pair[which]};" for name, pair in COLOURS.items()) for which in (0, 1)
    )
    return (
        f"{selector}{{{light}}}\n"
        f"@media (prefers-color-scheme: dark){{{selector}{{{dark}}}}}\n"
        f"@media print{{{selector}{{{light}}}}}\n"
    )


def _element(drawing: Drawing, identity: str) -> ElementTree.Element:
    root = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {_number(drawing.width)} {_number(drawing.height)}",
            "font-family": _FONT,
            "role": "img",
            "aria-labelledby": f"{identity}-title {identity}-desc",
        },
    )
    title = ElementTree.SubElement(root, "title", {"id": f"{identity}-title"})
    title.text = printable(drawing.title)
    words = ElementTree.SubElement(root, "desc", {"id": f"{identity}-desc"})
    words.text = printable(drawing.description, 4000)
    root.extend(map(_of_mark, drawing.marks))
    return root


def _of_mark(mark: Mark) -> ElementTree.Element:
    match mark:
        case Rectangle():
            places = {"x": mark.x, "y": mark.y, "width": mark.width, "height": mark.height}
            return _with_tip(_made("rect", places, f"fill:{_colour(mark.fill)}"), mark.tip)
        case Cells():
            return ElementTree.Element(
                "path", {"d": _outlines(mark), "style": f"fill:{_colour(mark.fill)}"}
            )
        case Line():
            how = f"fill:none;stroke:{_colour(mark.stroke)};stroke-width:{_number(mark.width)}"
            how += f";stroke-dasharray:{mark.dashes}" if mark.dashes else ""
            points = {"points": _points(mark.points), "style": f"{how};stroke-linejoin:round"}
            return ElementTree.Element("polyline", points)
        case Area():
            how = f"fill:{_colour(mark.fill)};fill-opacity:{_number(mark.opacity)}"
            return ElementTree.Element("polygon", {"points": _points(mark.points), "style": how})
        case Dot():
            places = {"cx": mark.x, "cy": mark.y, "r": mark.radius}
            return _with_tip(_made("circle", places, f"fill:{_colour(mark.fill)}"), mark.tip)
        case Words():
            element = _made("text", {"x": mark.x, "y": mark.y}, f"fill:{_colour(mark.fill)}")
            element.attrib |= {"text-anchor": mark.anchor, "font-size": str(mark.size)}
            element.text = printable(mark.text, 200)
            return element


def _made(name: str, places: dict[str, float], style: str) -> ElementTree.Element:
    numbers = {key: _number(value) for key, value in places.items()}
    return ElementTree.Element(name, numbers | {"style": style})


def _with_tip(element: ElementTree.Element, tip: str) -> ElementTree.Element:
    if tip:
        ElementTree.SubElement(element, "title").text = printable(tip, 200)
    return element


def _outlines(cells: Cells) -> str:
    return "".join(
        f"M{_number(x)} {_number(y)}h{_number(width)}v{_number(height)}h-{_number(width)}z"
        for x, y, width, height in cells.places
    )


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _colour(name: str) -> str:
    return f"var(--{name},{COLOURS[name][0]})"


def _number(value: float) -> str:
    text = f"{value:.2f}"
    return text.rstrip("0").rstrip(".")
