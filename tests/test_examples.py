"""The examples of scripts/examples and of `load`, run as they stand, with the default model."""

import doctest
import json
import subprocess
import sys

import pytest
from conftest import ROOT
from package_data import default_model

import llamagpu
from llamagpu.hub.catalogue import suggested_sampling

EXAMPLES = ROOT / "scripts" / "examples"
# A line of each one's output that does not depend on the adapter.
SCRIPTS = {
    "chat": "The capital of France is Paris.",
    "stream": "The sun rises in the east and sets in the west.",
    "embeddings": "The cat sleeps on the warm sofa.",
}


def test_every_example_is_run():
    others = {"notebook.ipynb", "ray_batch.py"}  # tests/test_ray.py runs the latter
    assert {path.name for path in EXAMPLES.iterdir()} == {*(f"{name}.py" for name in SCRIPTS), *others}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name, gpu):
    default_model()
    result = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert SCRIPTS[name] in result.stdout


def test_notebook(gpu, capsys):
    default_model()
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], {cell["cell_type"] for cell in notebook["cells"]}) == (4, {"code", "markdown"})
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            exec("".join(cell["source"]), names)
    assert "Paris" in capsys.readouterr().out and names["llama"].closed
    assert names["llama"].sampling == llamagpu.Sampling(**suggested_sampling("smollm2"))
    cat, sofa, rates = names["vectors"]
    assert cat @ sofa > cat @ rates


def test_docstring_of_load(gpu):
    default_model()
    test = next(t for t in doctest.DocTestFinder().find(llamagpu.load, "load", globs={}) if t.examples)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
