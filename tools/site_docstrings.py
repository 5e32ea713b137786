"""A Griffe extension for `make site`: `>>>` lines of a docstring become a block of code."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*(?:\n|$)|^\.\.\. .*(?:\n|$))+", re.M)


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            value = obj.docstring.value
            obj.docstring.value = EXAMPLE.sub(
                lambda lines: f"```python\n{lines[0].rstrip()}\n```\n", value
            )
