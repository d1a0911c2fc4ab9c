"""Every statement that puts something back after a phase, and the same functions with one of them taken out."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.phase_disturbances import DISTURBANCES
from helpers.phase_runs import leave_no_trace
from helpers.phase_training import VARIANTS

from latentcache.errors import PhaseError
from latentcache.phases import module_state, process_state, weights


def restores() -> list[tuple[Any, str, int]]:
    """Every statement of every function that puts something back: its owner, its name, its number in it."""
    owners: list[tuple[Any, str]] = [
        (module_state.TrainingModes, "restore"),
        (module_state.RequiresGrad, "restore"),
        (module_state._Contents, "restore"),
        (module_state.ModuleHooks, "restore"),
        (module_state.ModuleSettings, "restore"),
        (module_state._Attributes, "restore"),
        (process_state.RandomStreams, "restore"),
        (process_state.GlobalFlags, "restore"),
        (weights.EmaWeights, "restore"),
        (weights.ScheduleFreeMode, "restore"),
        (weights.Weights, "restore"),
        (weights.Weights, "restore_dtypes"),
        (weights.KeptMemory, "put"),
        (weights.Gradients, "restore"),
        (process_state, "set_rng_state"),
    ]
    return [(owner, name, number) for owner, name in owners for number in range(len(statements_of(owner, name)))]


def statements_of(owner: Any, name: str, tree: ast.AST | None = None) -> list[ast.stmt]:
    """The simple statements of a function that do something: assignments that only name a value are none."""
    tree = tree or ast.parse(textwrap.dedent(inspect.getsource(getattr(owner, name))))
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Delete)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "logger" not in ast.unparse(node))
        or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple))
    ]


def without(owner: Any, name: str, number: int) -> Callable[..., Any]:
    """The function with one statement taken out."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(owner, name))))
    taken = statements_of(owner, name, tree)[number]

    class Remove(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return ast.Pass() if node is taken else self.generic_visit(node)

    module = inspect.getmodule(getattr(owner, name))
    namespace = dict(vars(module))
    exec(compile(ast.fix_missing_locations(Remove().visit(tree)), str(module), "exec"), namespace)
    return namespace[name]


def text_of(owner: Any, name: str, number: int) -> str:
    """The statement."""
    return ast.unparse(statements_of(owner, name)[number])


def cases(keep: Callable[[str], bool]) -> list[Any]:
    """The statements that `keep` keeps, as pytest parameters."""
    return [
        pytest.param(owner, name, number, id=f"{owner.__name__.split('.')[-1]}.{name}-{number}")
        for owner, name, number in restores()
        if keep(text_of(owner, name, number))
    ]


def is_noticed(device: torch.device) -> bool:
    """Whether a run that is disturbed in every way shows that something was not put back."""
    for variant in VARIANTS:
        try:
            leave_no_trace(device, variant, DISTURBANCES)
        except (PhaseError, AssertionError, RuntimeError):
            return True
    return False
