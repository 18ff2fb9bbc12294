"""The package: import direction, declared dependencies, the wheel and its version."""

import ast
import graphlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from contextlib import nullcontext
from email import message_from_bytes
from importlib import metadata
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from conftest import ROOT

from llamagpu import __version__
from llamagpu.errors import install_extra

PACKAGE = ROOT / "llamagpu"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The packages, the lowest first. A module imports its own package and those of lower layers.
LAYERS = [
    {"errors", "progress", "markdown", "results"},
    {"arguments"},
    {"files", "gpu"},
    {"engine", "hub"},
    {"llama"},
    {"conversation"},
    {"__init__"},
    {"perplexity", "verify", "llm_plugin", "ray"},
    {"profile", "convert", "devices"},
    {"bench", "serve"},
    {"batch"},
    {"cli"},
    {"__main__"},
]
# Narrower than the layers allow.
ONLY = {
    "gpu": {"gpu", "errors", "files.atomic", "files.cache"},
    "hub": {"hub", "errors", "progress", "files.atomic", "files.cache", "files.architectures"},
    "__main__": {"cli"},
}
ONE_PLACE = {"wgpu": "gpu", "cffi": "gpu"}  # libraries that one package alone imports
BARRED_LIBRARIES = {"files": {"wgpu", "gguf"}, "gpu": {"gguf", "tokenizers", "jinja2"}}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(source: Path) -> str:
    """llamagpu/files/repack.py -> llamagpu.files.repack"""
    return ".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def type_checking_imports(tree: ast.AST) -> set[ast.AST]:
    """The import statements under `if TYPE_CHECKING:`, which do not run."""
    blocks = (n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


def imports(tree: ast.AST, types: bool = True) -> set[str]:
    """Full names of everything imported, at the top or inside functions; without `types` only imports that run."""
    found = set()
    skipped = set() if types else type_checking_imports(tree)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports would escape this test"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def package_of(name: str) -> str:
    """llamagpu.files.repack.repack -> files; llamagpu.Llama, which is no module -> __init__."""
    _, *rest = name.split(".")
    is_package = len(rest) > 1 or any(package in layer for package in rest for layer in LAYERS)
    return rest[0] if is_package else "__init__"


def allowed(package: str) -> set[str]:
    if package in ONLY:
        return ONLY[package]
    level = next((i for i, layer in enumerate(LAYERS) if package in layer), None)
    assert level is not None, f"{package} is in no layer of this test"
    return set().union(*LAYERS[:level], {package})


def wrong_imports(package: str, names: set[str]) -> set[str]:
    """The names that a module of `package` must not import."""
    ours = {name for name in names if name.split(".")[0] == "llamagpu"}
    return {
        name
        for name in ours
        if package_of(name) not in allowed(package) and ".".join(name.split(".")[1:3]) not in allowed(package)
    }


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_direction(source):
    package = source.relative_to(PACKAGE).parts[0].removesuffix(".py")
    names = imports(ast.parse(source.read_text()))
    assert not wrong_imports(package, names), f"{package} may import {allowed(package)}"


@pytest.mark.parametrize("library", ONE_PLACE)
def test_a_library_is_imported_in_one_package(library):
    users = [s for s in SOURCES if library in {n.split(".")[0] for n in imports(ast.parse(s.read_text()))}]
    assert {source.parent.name for source in users} == {ONE_PLACE[library]}


def test_import_direction_sees_every_import():
    code = "import llamagpu.cli\nfrom llamagpu import files, Llama\ndef f(): from llamagpu.gpu.x import y\n"
    found = imports(ast.parse(code))
    assert {package_of(name) for name in found} == {"cli", "files", "__init__", "gpu"}
    assert wrong_imports("engine", found) == {"llamagpu.cli", "llamagpu.Llama"}
    assert wrong_imports("files", found) == {"llamagpu.cli", "llamagpu.Llama", "llamagpu.gpu.x.y"}
    assert wrong_imports("cli", {"llamagpu.no_such_package.x"})
    assert not wrong_imports("hub", {"llamagpu.files.atomic.atomic_write"})
    assert wrong_imports("hub", {"llamagpu.files.repack.repack", "llamagpu.engine.load.load_model"})


def import_graph(trees: dict[str, ast.AST]) -> dict[str, set[str]]:
    """Module -> the modules that it imports when it is imported or run."""
    graph = {}
    for module, tree in trees.items():
        names = imports(tree, types=False)
        graph[module] = {name if name in trees else name.rpartition(".")[0] for name in names} & trees.keys()
    return graph


def test_no_import_cycle():
    trees = {module_name(source): ast.parse(source.read_text()) for source in SOURCES}
    graph = import_graph(trees)
    assert "llamagpu.engine.options" in graph["llamagpu.engine.engine"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the modules of the cycle


def test_cycles_are_found():
    lazy = "def f():\n    import pkg.b"
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pkg.b"
    for code, cyclic in ((lazy, True), (types, False)):
        graph = import_graph({"pkg.a": ast.parse(code), "pkg.b": ast.parse("from pkg.a import x")})
        assert graph == {"pkg.a": {"pkg.b"} if cyclic else set(), "pkg.b": {"pkg.a"}}
        with pytest.raises(graphlib.CycleError) if cyclic else nullcontext():
            graphlib.TopologicalSorter(graph).prepare()


def test_packages_know_their_libraries_only():
    """Reading files needs no GPU, GPU code knows no file format or text, and only `convert` uses gguf.

    So does one module of `files`, for types whose tables gguf has: it imports it when it meets one.
    """
    for source in SOURCES:
        if source.name == "grid_types.py":
            assert not re.search(r"^(from|import) gguf", source.read_text(), re.M)
            continue
        libraries = {name.split(".")[0] for name in imports(ast.parse(source.read_text()))}
        package = source.relative_to(PACKAGE).parts[0]
        assert not libraries & BARRED_LIBRARIES.get(package, set()), source
        assert "gguf" not in libraries or package == "convert", source


def undeclared(sources: list[Path], lines: list[str]) -> dict[str, str]:
    """Packages that `sources` import and `lines` of pyproject.toml do not declare, with a file that imports each."""
    declared = {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in lines}
    own = {"llamagpu", *(path.stem for path in (ROOT / "tests").glob("*.py"))}
    distributions, missing = packages_distributions(), {}
    for source in sources:
        for top in {name.split(".")[0] for name in imports(ast.parse(source.read_text()))}:
            owners = {d.lower().replace("_", "-") for d in distributions.get(top, [top])}
            if top not in sys.stdlib_module_names and top not in own and not owners & declared:
                missing[top] = source.name
    return missing


def test_third_party_imports_are_declared():
    extras = PROJECT["optional-dependencies"]
    assert not undeclared(
        SOURCES, PROJECT["dependencies"] + extras["plot"] + extras["serve"] + extras["llm"] + extras["ray"]
    )
    tests = sorted((ROOT / "tests").glob("*.py"))
    assert not undeclared(tests, PROJECT["dependencies"] + extras["test"] + extras["serve"] + extras["ray"])
    assert undeclared(tests, PROJECT["dependencies"])["pytest"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built with pip from the working tree. The build back-end is in the test extra, so no network is needed."""
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", out, ROOT]
    run = subprocess.run(pip, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return next(out.glob("llamagpu-*.whl"))


def test_wheel_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = message_from_bytes(archive.read(f"llamagpu-{__version__}.dist-info/METADATA"))
    kernels = {p.relative_to(ROOT / "kernels").as_posix() for p in (ROOT / "kernels").rglob("*.wgsl")}
    assert kernels and {f"llamagpu/_kernels/{name}" for name in kernels} <= names
    assert {p.relative_to(ROOT).as_posix() for p in SOURCES} | {"llamagpu/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"llamagpu", f"llamagpu-{__version__}.dist-info"}
    assert metadata["Version"] == __version__


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel installed."""
    folder = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--target", folder, wheel]
    subprocess.run(install, check=True, capture_output=True)
    return folder


def test_command_prints_the_version(site, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run([site / "bin/llamagpu", "--version"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == (f"llamagpu {__version__}\n", "")


def test_installed_wheel_finds_its_kernels(site, tmp_path):
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


def test_the_command_that_installs_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip takes it, for a package that is installed and for a clone that is not."""
    assert install_extra("serve") == f'{sys.executable} -m pip install "llamagpu[serve]"'

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setattr(sys, "executable", "/my tools/python")
    assert install_extra("plot") == f'"/my tools/python" -m pip install -e "{ROOT}[plot]"'
