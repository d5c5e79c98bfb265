"""The rules of the house, kept by reading the code."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("frontend", "scheduler", "worker", "kernels", "protocol")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("**/*.py")) + [ROOT / "launch.py"]
TESTS = sorted((ROOT / "tests").glob("**/*.py"))

MAY_IMPORT = {
    "protocol": set(),
    "kernels": set(),
    "scheduler": {"protocol"},
    "frontend": {"protocol"},
    "worker": {"protocol", "kernels"},
    "launch.py": {"protocol"},
}
# Whatever can run code from data, or needs a pickle.
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing"}
BANNED_NAMES = {"send_pyobj", "recv_pyobj", "broadcast_object_list", "all_gather_object", "eval", "exec"}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported_modules(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def place(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_functions_and_lines_stay_short(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    assert max(map(len, lines), default=0) <= 140
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 50, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_design(path):
    ours = imported_modules(tree_of(path)) & {*FOLDERS, "launch", "tests"}
    assert ours - {place(path)} <= MAY_IMPORT[place(path)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_decodes_code(path):
    tree = tree_of(path)
    assert not imported_modules(tree) & BANNED_MODULES
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            assert node.id not in BANNED_NAMES, f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in BANNED_NAMES - {"eval"}, f"line {node.lineno}"
            assert not (node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id == "torch")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_launcher_reads_the_environment(path):
    if path.name == "launch.py":
        return
    for node in ast.walk(tree_of(path)):
        assert not (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}), f"line {node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_public_name_says_what_it_does(path):
    tree = tree_of(path)
    if path.read_text():
        assert ast.get_docstring(tree), "the file has no docstring"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_the_kernels_package_itself_is_empty():
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""  # transformers probes a package of that name


def test_no_torch_where_no_tensor_is():
    modules = "scheduler.main, scheduler.core, protocol.lifeline, frontend.main, frontend.client, frontend.engine, launch"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_only_the_agreed_folders_lie_at_the_top():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    folders = {name.split("/")[0] for name in tracked if "/" in name}
    assert folders <= {*FOLDERS, "tests", ".ci"}
