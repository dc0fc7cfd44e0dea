"""No file, class or function is too large to hold in the head, and an object is complete once it is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FILES = [
    path
    for folder in ("framework/worldsize", "plugins", "recipes")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]
CONSTRUCTORS = ("__init__", "__post_init__", "__new__")

LINES, METHODS, FIELDS, PARAMETERS = 350, 12, 12, 7
MANY_METHODS = {
    "FSDP": "the answers of a strategy, of which it has its own to nearly all questions",
    "ModelReplica": "what a replica answers, and the parts of a step that subclasses share",
    "_HybridReplica": "what a replica does, for dense parameters and for rows on servers",
    "Mesh": "the answers of a strategy, of which a mesh has its own to nearly all questions",
    "ParameterServer": "the answers of a strategy, nearly all of them its own",
    "Recipe": "a question each that a strategy may ask of a model; all but five have an answer",
    "RunFacts": "a fact each that a LightningModule may ask of its Trainer",
    "ShardMaster": "a request each that a server answers",
    "StrategyContract": "a promise each that every strategy keeps",
    "Strategy": "a question each that the launcher or the planner may ask; all but two have an answer",
    "StdlibLM": "answers nearly every question that a strategy may ask of a recipe",
}
MANY_FIELDS = {
    "Cluster": "what a launcher offers, a key of the configuration each",
    "ClusterSchema": "keys of the configuration",
    "Schema": "keys of the configuration",
    "RunDirectory": "the paths of a run folder, a line each",
    "HealthRow": "the figures of a node, each a key of a line of JSON",
    "Settings": "a typed value for each section of the configuration, and the objects that these describe",
    "RunContext": "what a process may ask of its run, each a contract of its own",
    "Attempt": "the keys of an attempt in run_manifest.json",
    "Roster": "the state of one protocol, which does no I/O: who trains, waits, joins, leaves and has died",
    "StepDone": "what a line of metrics.jsonl says of a step; listeners of others read it",
    "Kubernetes": "options of a launcher, from which its keys of the configuration are generated",
    "SkyPilot": "options of a launcher, from which its keys of the configuration are generated",
    "Slurm": "options of a launcher, from which its keys of the configuration are generated",
    "ModelReplica": "the objects that a step needs, which strategies give it",
    "Worker": "the objects that a unit of work needs, which the strategy gives it",
    "ParameterServer": "options of a strategy, each a key of the configuration",
}
FOREIGN = {  # attributes of objects that are not ours, which their libraries ask users to set
    *("grad", "param_groups", "iter", "p_memory_dict", "deterministic", "benchmark"),  # torch
    *("allow_tf32", "simulate_uniform_ranks"),  # torch
    *("fail_on_recompile_limit_hit", "forward"),  # torch's compiler
    "fill_uninitialized_memory",  # of torch's deterministic mode
    *("_opt_called", "trainer"),  # torch's schedules look at the one, modules of Lightning have the other
    *("minimum_version", "check_hostname", "verify_mode", "handlers", "propagate", "stdout", "stderr", "epilog"),
    *("value", "caption", "overflow", "keep_trailing_newline", "_worker_info"),  # shared memory, rich, jinja2, torch
    "_worker_pids_set",  # of a loader's iterator of torch
    "atexit",  # of a finalizer
    *("_rank_not_in_group", "_resolve_group_name"),  # torch's collectives, each of which calls one of them
}


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax tree of each file, parsed for the first test of them, not where tests are only collected."""
    return {path: ast.parse(path.read_text()) for path in FILES}


@cache
def classes() -> list[ast.ClassDef]:
    return [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


@cache
def by_name() -> dict[str, ast.ClassDef]:
    return {node.name: node for node in classes()}


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Find every attribute that a statement below ``tree`` assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def assigned_to_self(method: ast.FunctionDef) -> set[str]:
    names = [argument.arg for argument in (*method.args.posonlyargs, *method.args.args)][:1]
    found = [each for each in assigned(method) if isinstance(each.value, ast.Name)]
    return {each.attr for each in found if isinstance(each.value, ast.Name) and each.value.id in names}


def fields(node: ast.ClassDef) -> set[str]:
    """Return the attributes that the class's body or constructor declares."""
    annotated = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    own = {
        each.target.id
        for each in annotated
        if isinstance(each.target, ast.Name) and "ClassVar" not in ast.unparse(each.annotation)
    }
    return own.union(*(assigned_to_self(each) for each in methods(node) if each.name in CONSTRUCTORS))


def declared(node: ast.ClassDef) -> set[str]:
    """Return the names that the class or one of our classes that it derives from declares."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    above = [by_name()[base.id] for base in bases if isinstance(base, ast.Name) and base.id in by_name()]
    body = [each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign)]
    named = [each for statement in body for each in ast.walk(statement) if isinstance(each, ast.Name)]
    own = {each.name for each in methods(node)} | {each.id for each in named if isinstance(each.ctx, ast.Store)}
    return own.union(fields(node), *(declared(each) for each in above if each is not node))


def is_static(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(each) in ("staticmethod", "classmethod") for each in method.decorator_list)


def parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    named = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    rest = [each.arg for each in (arguments.vararg, arguments.kwarg) if each]
    return [name for name in (*named, *rest) if name not in ("self", "cls")]


def short(path: Path) -> str:
    return str(path.relative_to(REPOSITORY)).removeprefix("framework/worldsize/")


def assert_listed(found: dict[str, object], reasons: dict[str, str]) -> None:
    """Assert that nothing is too large but what has a reason to be, and that no reason is left of what is small."""
    assert {name: value for name, value in found.items() if name not in reasons} == {}
    assert reasons.keys() - found.keys() == set()


def test_files_are_short() -> None:
    lines = {short(path): len(path.read_text().splitlines()) for path in FILES}
    assert {path: count for path, count in lines.items() if count > LINES} == {}


def test_classes_have_few_methods() -> None:
    count = [(node.name, len({each.name for each in methods(node)} - {*CONSTRUCTORS})) for node in classes()]
    assert_listed({name: number for name, number in count if number > METHODS}, MANY_METHODS)


def test_classes_have_few_fields() -> None:
    count = [(node.name, len(fields(node))) for node in classes()]
    assert_listed({name: number for name, number in count if number > FIELDS}, MANY_FIELDS)


def test_functions_have_few_parameters() -> None:
    nodes = [(path, node) for path, tree in trees().items() for node in ast.walk(tree)]
    functions = [(path, node) for path, node in nodes if isinstance(node, ast.FunctionDef)]
    many = [(path, node) for path, node in functions if len(parameters(node)) > PARAMETERS]
    assert [f"{short(path)}:{node.lineno} {node.name}" for path, node in many] == []


def test_attributes_are_declared_in_the_constructor_or_the_body_of_their_class() -> None:
    later: dict[str, object] = {}
    for node in classes():
        known = declared(node)
        others = [each for each in methods(node) if each.name not in CONSTRUCTORS and not is_static(each)]
        if born := set().union(*(assigned_to_self(each) for each in others)) - known:
            later[node.name] = born
    assert later == {}


def test_nothing_is_hung_onto_another_object() -> None:
    """Whoever assigns an attribute of another object assigns one that a class of ours declares."""
    known = FOREIGN.union(*map(declared, classes()))
    others = [
        f"{short(path)}:{each.lineno} {ast.unparse(each)}"
        for path, tree in trees().items()
        for each in assigned(tree)
        if ast.unparse(each.value) not in ("self", "cls") and each.attr not in known
    ]
    assert others == []
