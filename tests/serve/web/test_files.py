"""The files of the web page, without a browser: size, policy, references."""

import re
from html.parser import HTMLParser

import pytest

from tests.serve.web.server import MEDIA_TYPES, WEB

FILES = sorted(WEB.iterdir())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
MAX_BYTES = 150 * 1024
MAX_LINES = 500
# The only address in the files is a name: SVG documents must state it.
SVG_NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'


class Page(HTMLParser):
    """Collects what matters for the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, str] = {"script": "", "style": ""}
        self.open: str = ""
        self.feed((WEB / "index.html").read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open = tag
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.open in self.texts:
            self.texts[self.open] += data.strip()


def references() -> set[str]:
    """Names of the files that the page or another file asks for."""
    in_page = {v for _, name, v in Page().attributes if name in {"src", "href"} and v[0] != "#"}
    assert all(re.fullmatch(r"ui/[a-z]+\.[a-z]+", reference) for reference in in_page), in_page
    found = {reference.removeprefix("ui/") for reference in in_page}
    for path in SCRIPTS:
        imports = re.findall(r'^(?:import|\} from)\b.*"(.*)";$', path.read_text(), re.MULTILINE)
        assert all(re.fullmatch(r"\./[a-z]+\.js", name) for name in imports), (path.name, imports)
        found |= {name.removeprefix("./") for name in imports}
    return found


def test_the_page_is_small():
    assert sum(path.stat().st_size for path in FILES) < MAX_BYTES
    for path in FILES:
        assert path.read_text().count("\n") <= MAX_LINES, f"{path.name}: split it"


def test_every_file_is_plain_known_and_used():
    for path in FILES:
        assert path.is_file()
        assert path.suffix in MEDIA_TYPES
        assert re.fullmatch(r"[a-z]+\.[a-z]+", path.name)
    assert references() | {"index.html"} == {path.name for path in FILES}


def test_nothing_is_inline():
    page = Page()
    assert page.texts == {"script": "", "style": ""}
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), f"{tag} {name}"
        assert name != "style", tag
        assert not value.lower().startswith(("javascript:", "data:", "http:", "https:", "//"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_another_server(path):
    text = path.read_text().replace(SVG_NAMESPACE, "")
    addresses = re.findall(r"https?:.{0,40}", text)
    # inline.js recognises links in answers; it asks for nothing.
    assert addresses == [] or path.name == "inline.js"
    assert "url(" not in text
    assert "@import" not in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_makes_markup_or_code_from_strings(path):
    sinks = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|srcdoc"
        r"|DOMParser|setHTML|\beval\b|new Function|\bimport\(|set(?:Timeout|Interval)\(\s*[\"'`]"
    )
    assert re.findall(sinks, path.read_text()) == []
