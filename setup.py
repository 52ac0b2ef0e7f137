"""Everything else is in pyproject.toml. Package indexes show README.md without the repository: its links become absolute."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGES, IMAGES = (f"{PROJECT['urls']['Repository']}/{kind}/main/" for kind in ("blob", "raw"))


def absolute(link: re.Match[str]) -> str:
    return f"{link[1]}[{link[2]}]({IMAGES if link[1] else PAGES}{link[3]})"


if __name__ == "__main__":
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    readme = re.sub(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)", absolute, readme)
    setup(long_description=readme, long_description_content_type="text/markdown")
