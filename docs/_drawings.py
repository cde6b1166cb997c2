"""Drawings written as text (Mermaid) on the pages, as pictures that need no network.

`python docs/_drawings.py` draws those that are new, by Mermaid's own command line,
which needs Node.js and Chromium. A picture is named by its text: none can be outdated.
"""

import hashlib
import json
import re
import subprocess
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
PICTURES = DOCS / "assets" / "drawings"
BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# text as text rather than as HTML inside the picture, which not every viewer shows
LOOK = {"theme": "neutral", "htmlLabels": False, "flowchart": {"htmlLabels": False}}
# Chromium refuses to run as root inside its own sandbox
BROWSER = {"executablePath": "/usr/bin/chromium", "args": ["--no-sandbox"]}


def picture(text: str) -> Path:
    """Where the picture of a drawing is."""
    return PICTURES / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.svg"


def with_pictures(markdown: str, up: str) -> str:
    """A page with pictures for drawings; `up` leads from the page to the top."""

    def image(found: re.Match[str]) -> str:
        file = picture(found[1])
        if not file.exists():
            raise FileNotFoundError(f"{file.name}: run python docs/_drawings.py")
        return f"![Drawing]({up}{file.relative_to(DOCS).as_posix()}){{.drawing}}"

    return BLOCK.sub(image, markdown)


def main() -> None:
    """Draws what is not drawn yet and removes what no page shows any more."""
    pages = [page.read_text() for page in DOCS.rglob("*.md")]
    texts = {picture(text): text for page in pages for text in BLOCK.findall(page)}
    PICTURES.mkdir(exist_ok=True)
    for file in set(PICTURES.glob("*.svg")) - set(texts):
        file.unlink()
    with tempfile.TemporaryDirectory() as folder:
        look, browser = Path(folder, "look.json"), Path(folder, "browser.json")
        look.write_text(json.dumps(LOOK))
        browser.write_text(json.dumps(BROWSER))
        tool = ["npx", "--yes", "@mermaid-js/mermaid-cli", "--quiet"]
        options = ["--configFile", look, "--puppeteerConfigFile", browser]
        for file, text in texts.items():
            if not file.exists():
                command = [*tool, *options, "--input", "-", "--output", file]
                subprocess.run(command, input=text, text=True, check=True)


if __name__ == "__main__":
    main()
