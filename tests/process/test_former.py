"""Keywords that a function had once are refused with what to write in their place."""

import dataclasses
import inspect
import operator
from typing import Any

import pytest

import fsdp_sft as fs
from fsdp_sft._process.former import FORMER


def test_what_estimate_memory_took_are_fields_of_a_run() -> None:
    assert FORMER["estimate_memory"].keys() <= {field.name for field in dataclasses.fields(fs.Run)}


@pytest.mark.parametrize(("name", "keyword"), [(name, k) for name, all_ in FORMER.items() for k in all_])
def test_a_former_keyword_says_what_to_do_now(name: str, keyword: str) -> None:
    function: Any = operator.attrgetter(name)(fs)
    assert keyword not in inspect.signature(function).parameters
    assert all(one.kind is not one.VAR_KEYWORD for one in inspect.signature(function).parameters.values())
    with pytest.raises(TypeError, match=rf"takes no {keyword}= any more: "):
        function(**{keyword: None})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nothing_of_it'"):
        function(nothing_of_it=None)
