"""``Example:`` sections of docstrings, shown as code.

griffe knows the plural alone and takes the singular for a note, in which ``>>>`` would be a quotation.
"""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Look at one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
