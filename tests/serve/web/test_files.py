"""The files of the web page, without a browser: size, policy, references."""

import re
import tomllib
from hashlib import sha256
from html.parser import HTMLParser

import pytest

from tests.serve.web.server import MEDIA_TYPES, WEB

FILES = sorted(path for path in WEB.iterdir() if path.is_file())  # our own
(LIBRARY,) = (path for path in WEB.iterdir() if path.is_dir())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
MAX_BYTES = 160 * 1024  # of our own; the packaged library comes with the first formula
MAX_LINES = 500
SUM = re.compile(r"[0-9a-f]{64}  ")
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
        r"|DOMParser|setHTML|\beval\b|new Function|set(?:Timeout|Interval)\(\s*[\"'`]"
        rf'|\bimport\((?!"\./{LIBRARY.name}/katex\.min\.js"\))'
    )
    assert re.findall(sinks, path.read_text()) == []


# --- the packaged library ---


def test_the_library_is_what_its_origin_says():
    """Each file has the sum that was noted when it came; nothing else is there but two texts."""
    origin = (LIBRARY / "ORIGIN.txt").read_text()
    assert f"KaTeX {LIBRARY.name.removeprefix('katex-')}:" in origin
    noted = dict(reversed(line.split("  ")) for line in origin.splitlines() if SUM.match(line))
    paths = {p.relative_to(LIBRARY).as_posix(): p for p in LIBRARY.rglob("*") if p.is_file()}
    assert set(paths) - set(noted) == {"ORIGIN.txt", "fonts/OFL.txt"}
    assert {name: sha256(paths[name].read_bytes()).hexdigest() for name in noted} == noted


def test_the_package_names_the_licences_of_the_library():
    with (WEB.parents[2] / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert project["license"] == "Apache-2.0 AND MIT AND OFL-1.1"
    named = {WEB.parents[2] / name for name in project["license-files"]}
    assert {LIBRARY / "LICENSE.txt", LIBRARY / "fonts/OFL.txt"} <= named
    assert all(path.is_file() for path in named)


def test_the_style_sheet_of_the_library_asks_for_packaged_fonts():
    urls = re.findall(r"url\((.*?)\)", (LIBRARY / "katex.min.css").read_text())
    wanted = {url for url in urls if url.endswith(".woff2")}
    assert wanted == {f"fonts/{path.name}" for path in LIBRARY.glob("fonts/*.woff2")}
    assert all(url.startswith("fonts/") for url in urls)
