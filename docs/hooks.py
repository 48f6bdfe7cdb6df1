"""MkDocs hook: formulas become MathML when the site is built, so that pages need no script and no network."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

# What pymdownx.arithmatex with `generic` leaves of $...$ and $$...$$.
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_page_content(content: str, **_) -> str:
    """Content with every formula converted; a formula that cannot be is an error that stops the build."""

    def to_mathml(match: re.Match) -> str:
        display = "block" if match["open"] == "[" else "inline"
        formula = convert(html.unescape(match["latex"].strip()), display=display)
        if "\\" in formula:
            raise ValueError(f"not known to latex2mathml: {match['latex']}")
        return formula

    converted = FORMULA.sub(to_mathml, content)
    if 'class="arithmatex"' in converted:
        raise ValueError("a formula was not converted")
    return converted
