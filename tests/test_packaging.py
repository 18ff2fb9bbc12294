"""What is shipped, what is declared, and who may import whom."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "llamagpu"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Part -> the parts it may import. errors is the floor of all.
MAY_IMPORT = {
    "errors": set(),
    "files": {"files", "errors"},
    "gpu": {"gpu", "errors"},
    "engine": {"engine", "files", "gpu", "errors"},
    "tools": {"tools", "engine", "files", "gpu", "errors", "__init__"},
    "__init__": {"tools", "engine", "files", "gpu", "errors"},
    "options": set(),
    "terminal": {"errors"},
    "talk": {"terminal", "engine", "errors"},
    "cli": {
        "cli_convert", "cli_measure", "options", "talk", "terminal",
        "tools", "engine", "files", "gpu", "errors", "__init__",
    },
    "cli_convert": {"options", "terminal", "tools", "engine", "errors"},
    "cli_measure": {"cli_bench", "options", "terminal", "tools", "engine", "gpu", "errors"},
    "cli_bench": {"options", "terminal", "tools", "engine", "gpu", "errors"},
    "__main__": {"cli"},
}


def imports(tree: ast.AST) -> set[str]:
    """Full names of all that is imported, at the top or inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports would escape this test"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part_of(name: str) -> str:
    """llamagpu.files.repack.Packed -> files; what is no module of ours comes from the package itself."""
    part = name.split(".")[1] if "." in name else "__init__"
    return part if part in MAY_IMPORT else "__init__"


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_direction(source):
    part = source.relative_to(PACKAGE).parts[0].removesuffix(".py")
    ours = {name for name in imports(ast.parse(source.read_text())) if name.split(".")[0] == "llamagpu"}
    wrong = {name for name in ours if part_of(name) not in MAY_IMPORT[part]}
    assert not wrong, f"{part} may import {MAY_IMPORT[part]}"


def test_parts_know_their_libraries_only():
    """Reading files needs no GPU, the GPU code knows no file format or text."""
    for source in SOURCES:
        libraries = {name.split(".")[0] for name in imports(ast.parse(source.read_text()))}
        part = source.relative_to(PACKAGE).parts[0]
        barred = {"files": {"wgpu", "gguf"}, "gpu": {"gguf", "tokenizers", "jinja2"}}.get(part, set())
        assert not libraries & barred, source


def test_import_direction_sees_through():
    code = "import llamagpu.cli\nfrom llamagpu import files, Llama\ndef f(): from llamagpu.gpu.x import y\n"
    assert {part_of(n) for n in imports(ast.parse(code))} == {"cli", "files", "__init__", "gpu"}


def test_third_party_imports_are_declared():
    lines = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["plot"]
    declared = {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in lines}
    distributions = packages_distributions()
    for source in SOURCES:
        for name in imports(ast.parse(source.read_text())):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top == "llamagpu":
                continue
            owners = {d.lower().replace("_", "-") for d in distributions.get(top, [top])}
            assert owners & declared, f"{source.name} imports {top}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built with pip from the working tree, with the test extra's own build back-end: no network."""
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", out, ROOT]
    run = subprocess.run(pip, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return next(out.glob("llamagpu-*.whl"))


def test_wheel_holds_package_and_kernels(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    kernels = {p.relative_to(ROOT / "kernels").as_posix() for p in (ROOT / "kernels").rglob("*.wgsl")}
    assert kernels and {f"llamagpu/_kernels/{name}" for name in kernels} <= names
    assert {p.relative_to(ROOT).as_posix() for p in SOURCES} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"llamagpu", "llamagpu-0.1.0.dist-info"}


def test_installed_wheel_finds_its_kernels(wheel, tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from llamagpu.gpu import shaders\n"
        "print(shaders.kernel_root(), *sorted(shaders.kernel_files()), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    root, *names = run.stdout.splitlines()
    assert Path(root) == site / "llamagpu" / "_kernels"
    assert names == sorted(p.stem for p in (ROOT / "kernels").rglob("*.wgsl"))


def test_checkout_finds_its_kernels():
    from llamagpu.gpu import shaders

    assert shaders.kernel_root() == ROOT / "kernels"
