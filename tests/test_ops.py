"""The table of ops: what fronts, README, changelog and pages say of it is what it says."""

import re
from pathlib import Path

import pytest

import ejkernel
from ejkernel._ops import DEVICES, NAMES, OPS, platform_table

ROOT = Path(__file__).parent.parent


def test_every_public_op_is_in_the_table():
    functions = {name for name in ejkernel.__all__ if callable(getattr(ejkernel, name))}
    assert set(OPS) == {
        name for name in functions - {"debug", "explain"} if not isinstance(getattr(ejkernel, name), type)
    }


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_fronts_have_the_implementations_of_the_table(op):
    arguments, options = op.ordinary_call()
    front = getattr(ejkernel, op.name)
    with pytest.raises(ejkernel.PlatformError) as error:
        ejkernel.explain(front, *arguments, **options, platform="no such thing")
    assert re.findall(r"'(\w+)'", str(error.value)) == [each.name for each in op.implementations]
    explanation = ejkernel.explain(front, *arguments, **options)
    assert {*explanation.chosen.values(), *explanation.refused} == {each.name for each in op.implementations}


def test_the_readme_says_where_each_op_runs():
    rows = re.findall(r"^\| (`.*`) \| .* \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    said = {name: where for names, where in rows for name in re.findall(r"`([\w.]+)`", names)}
    assert {name: said[name] for name in OPS} == {name: op.runs_on() for name, op in OPS.items()}


def test_the_changelog_names_every_implementation_and_no_other():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    ours = {NAMES[each.name] for op in OPS.values() for each in op.implementations}
    assert {name for name in ("XLA", "Triton", "cuDNN", "Pallas", "splash") if name in changelog} == ours


def test_every_implementation_and_device_has_a_name():
    implementations = [each for op in OPS.values() for each in op.implementations]
    assert {each.name for each in implementations} == set(NAMES)
    assert {device for each in implementations for device in each.devices or (None,)} == set(DEVICES)


def test_the_table_of_platforms():
    assert "| `recurrent` | `xla` | `triton` | `pallas` |" in platform_table().splitlines()
