"""Imports point downward only, and light modules import nothing heavy (docs/layout.md)."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "unsloth", "vllm", "gradio", "trl", "peft", "datasets", "matplotlib", "pyarrow"}

# From the bottom up, one rank per line. A file imports from its own package and from lower ranks, never from another
# package of the same rank; "kit" itself may import all. docs/layout.md describes them.
FLOORS = [
    ["kit.errors", "kit.threads"],
    ["kit.registry", "kit.runs", "kit.environments"],
    ["kit.config", "kit.objective"],
    ["kit.data", "kit.models"],
    ["kit.generation", "kit.scoring"],
    ["kit.evaluation", "kit.trainer"],
    ["kit.report", "kit.runner"],
    ["kit.train", "kit.launch", "kit.model_check", "kit.planning", "kit.export", "kit.chat"],
    ["kit.api", "kit.studies"],
    ["kit.ui"],
    ["kit.cli"],
]
# The ranks of rewards, which imports nothing from kit; the package "rewards" itself has a rank, too.
REWARDS_LAYERS = [
    "rewards.errors",
    "rewards.protocol",
    "rewards.parameters",
    "rewards.extract",
    "rewards.samples",
    "rewards.evaluation",
    "rewards.adaptors",
    "rewards.preset",
    "rewards.functions",
    "rewards.http",
    "rewards.parallel",
    "rewards.isolation",
    "rewards.sandbox",
    "rewards.components",
    "rewards.presets",
    "rewards.compat",
    "rewards.attacks",
    "rewards.testing",
    "rewards.audit",
    "rewards",
    "rewards.__main__",
]
RANK = {package: rank for rank, floor in enumerate(FLOORS) for package in floor}
RANK |= {package: rank for rank, package in enumerate(REWARDS_LAYERS)}

# Allowed packages beyond the standard library, at any depth, lazy imports included. Unlisted layers are free.
ALLOWED = {
    "kit.errors": set(),
    "kit.threads": set(),
    "kit.registry": {"kit.errors", "rewards"},
    "kit.config": {"kit.errors", "kit.registry", "kit.config", "pydantic", "yaml"},
    "kit.runs": {"kit.errors", "kit.runs", "psutil"},
    "kit.environments": {"kit.environments"},
    "kit.objective": {"kit.errors", "kit.registry", "kit.objective", "torch", "yaml", "verl"},
}
TORCH = {"kit.models", "kit.generation", "kit.scoring", "kit.trainer", "kit.runner", "kit.train"}
FORBIDDEN = {"kit.ui": {"torch", "unsloth", "vllm", "trl", "transformers"} | TORCH}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


FILES = [*sources("kit"), *sources("rewards")]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(parsed(path)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(path: Path, *, top_level: bool = False) -> Iterator[tuple[str, int]]:
    """Yield the absolute names of imported modules with their lines; `top_level` excludes imports inside functions."""
    for node in _outside_functions(parsed(path)) if top_level else import_statements(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            name = str(node.module)
            if name == "kit":
                yield from ((f"kit.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield name, node.lineno


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not typing_only and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from _outside_functions(node)


def layer(module: str) -> str:
    return ".".join(module.split(".")[:2])


def is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def is_allowed(module: str, name: str) -> bool:
    """Return whether `module` may import `name`."""
    own, target, package = layer(module), layer(name), name.partition(".")[0]
    if module == "kit":
        return True
    if package == "rewards" != own.partition(".")[0]:
        return True
    if own.startswith("rewards"):
        return package != "kit" and RANK.get(target, 0) <= RANK[own]
    return (
        (target == own or RANK.get(target, -1) < RANK[own])
        and (own not in ALLOWED or is_standard(name) or bool({target, package} & ALLOWED[own]))
        and not {target, package} & FORBIDDEN.get(own, set())
    )


def test_imports_point_downward() -> None:
    layers = {layer(module_of(path)) for path in FILES} - {"kit"}
    assert layers <= RANK.keys(), "the table of layers lacks a module"
    faults = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in FILES
        for name, line in imports(path)
        if not is_allowed(module_of(path), name)
    ]
    assert not faults, "\n".join(faults)


def test_rewards_import_only_the_standard_library_outside_functions() -> None:
    outside = {
        (module_of(path), name)
        for path in sources("rewards")
        for name, _ in imports(path, top_level=True)
        if not is_standard(name) and name.partition(".")[0] != "rewards"
    }
    assert not outside


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return import cycles: the strongly connected components of more than one module."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        reached, open_ends = set[str](), [start]
        while open_ends:
            new = graph.get(open_ends.pop(), set()) - reached
            reached |= new
            open_ends += new
        reach[start] = reached
    groups = {
        tuple(sorted({name, *(other for other in reach[name] if name in reach.get(other, ()))}))
        for name in graph
        if name in reach[name]
    }
    return [list(circle) for circle in sorted(groups)]


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Return the members of `modules` that a file imports, including imports in functions and for type checking."""
    named = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        else:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= {member if member in modules else str(node.module) for member in members}
    return (named & modules) - {"kit", "rewards", module_of(path)}


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = {module_of(path): path for path in FILES if module_of(path) not in ("kit", "rewards")}
    graph = {module: imported_modules(path, set(paths)) for module, path in paths.items()}
    assert circles(graph) == []


def test_only_the_backend_imports_unsloth() -> None:
    users = {
        module_of(path)
        for path in [*FILES, *ROOT.glob("*.py")]
        for name, _ in imports(path)
        if name.partition(".")[0] in ("unsloth", "unsloth_zoo")
    }
    assert users <= {"kit.models.backend"}


@pytest.mark.parametrize(
    "statement",
    [
        "import kit",
        "import kit; kit.train, kit.Run",
        "import kit; kit.load_config('quickstart')",
        "import kit.data",
        "import kit.objective.recipes",
        "import kit.runs.worker",
        "import kit.config.schema",
        "import kit.studies.compare, kit.studies.arms",
        "import sys; sys.argv = ['grpo-kit', '--help']\nfrom kit.cli.app import main\ntry: main()\nexcept SystemExit: pass",
    ],
)
def test_light_imports_load_nothing_heavy(statement: str) -> None:
    code = f"{statement}\nimport sys; print('LOADED', *sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.rpartition("LOADED")[2].split())
    assert not loaded & HEAVY
    if statement == "import kit":
        assert "pydantic" not in loaded


def test_the_top_level_of_the_repository_is_the_fixed_list() -> None:
    fixed = {"pyproject.toml", "README.md", "app.py", "kit", "rewards", "notebooks", "examples", "tests"}
    customary = {"LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "docs", "benchmarks", ".ci", ".gitignore"}
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    top = {name.partition("/")[0] for name in listed}
    assert top <= fixed | customary, f"not in the fixed list: {sorted(top - fixed - customary)}"


def test_files_of_tests_outside_packages_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    assert sorted(names) == sorted(set(names)), "pytest cannot import two modules of one name"
