"""Pages of HTML taken apart, to see what they hold."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

MARKS = ("rect", "path", "polyline", "polygon", "circle")
_VOID = ("meta", "link", "br", "img", "input")


@dataclass
class Page(HTMLParser):
    """Its elements with their attributes; `marks` of each drawing, text outside of tags."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    text: str = ""
    open_elements: list[str] = field(default_factory=list)
    wrongly_closed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "svg":
            self.marks.append(0)
        if tag in MARKS:
            self.marks[-1] += 1
        if tag not in _VOID:
            self.open_elements.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open_elements.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open_elements or self.open_elements.pop() != tag:
            self.wrongly_closed.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data

    def all_of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def taken_apart(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    return page
