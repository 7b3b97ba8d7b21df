"""The operations that the engine runs on the host: in C++ if the extension is built, else in Python.

The Python specification (``method`` and ``planner``) and the extension ``vllm_gsd._core`` (``kernels/cpu/core``) give
the same bits, so ranks with and without the extension grow the same graphs. Python takes about a hundred times as long.
Callers import the operations from here. ``VLLM_GSD_NO_EXTENSION=1`` selects the specification.
"""

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from vllm_gsd.method import cells, constants, draft_level, graph, growth, lattice, lay_out, ngram, outcome, verify
from vllm_gsd.method import flatten as flattening
from vllm_gsd.method import text_rows as texts
from vllm_gsd.method.flatten import FlatTrees
from vllm_gsd.method.graph import GraphBatch
from vllm_gsd.planner import rates, regression

_EXTENSION = "vllm_gsd._core"
Operation = TypeVar("Operation", bound=Callable[..., Any])


def load_extension() -> ModuleType | None:
    """Import the extension; return None, with a warning that gives the reason, if it cannot be used."""
    try:
        if os.environ.get("VLLM_GSD_NO_EXTENSION") == "1":
            raise ImportError("VLLM_GSD_NO_EXTENSION is set")
        if importlib.util.find_spec(_EXTENSION) is None:
            raise ImportError("it is not built")
        extension = importlib.import_module(_EXTENSION)
        check_constants(getattr(extension, "CONSTANTS", {}))
    except ImportError as error:
        logging.getLogger(__name__).warning(
            "vllm_gsd: graphs are grown in plain Python, which is slow: the extension %s is not used (%s).",
            _EXTENSION,
            error,
        )
        return None
    return extension


def check_constants(built: dict[str, Any]) -> None:
    """Check the constants that an extension was built with against ``method.constants``.

    Raises:
        ImportError: it was built from other sources.
    """
    ours = {name: value for name, value in vars(constants).items() if name.isupper()}
    built = {name: tuple(value) if isinstance(value, list) else value for name, value in built.items()}
    differing = sorted(name for name in ours.keys() | built.keys() if ours.get(name) != built.get(name))
    if differing:
        name = differing[0]
        raise ImportError(
            f"it was built from other sources: its {name} is {built.get(name)}, not {ours.get(name)}; build it again"
        )


_extension = load_extension()


def _operation(specification: Operation) -> Operation:
    """The extension's version of an operation, or the specification without the extension."""
    return specification if _extension is None else getattr(_extension, specification.__name__)


# Growth of graphs, and copies from texts.
reset_all = _operation(graph.reset_all)
add_candidates = _operation(growth.add_candidates)
next_frontier = _operation(growth.next_frontier)
add_lattices = _operation(lattice.add_lattices)
graft_all_ngrams = _operation(ngram.graft_all_ngrams)
graft_tree = _operation(ngram.graft_tree)

# Rows of draft forwards.
frontier_chances = _operation(draft_level.frontier_chances)
keep_best = _operation(draft_level.keep_best)
parent_lines = _operation(draft_level.parent_lines)
level_rows = _operation(draft_level.level_rows)
next_rows = _operation(texts.next_rows)
text_rows = _operation(texts.text_rows)
kv_slots = _operation(texts.kv_slots)

# Verification, from the graph to the accepted path.
lay_tree = _operation(lay_out.lay_tree)
ancestor_masks = _operation(lay_out.ancestor_masks)
batch_masks = _operation(lay_out.batch_masks)
step_into = _operation(verify.step_into)
follow = _operation(verify.follow)
is_chain = _operation(verify.is_chain)
kv_moves = _operation(outcome.kv_moves)
tally = _operation(outcome.tally)

# Learning and planning.
chances = _operation(cells.chances)
learn = _operation(cells.learn)
learn_of_requests = _operation(cells.learn_of_requests)
follow_clock = _operation(regression.follow_clock)
read = _operation(rates.read)
best_rate = _operation(rates.best_rate)
drafts_rate = _operation(rates.drafts_rate)
follow_children = _operation(rates.follow_children)
follow_graphs = _operation(rates.follow_graphs)
level_size = _operation(rates.level_size)
best_nodes = _operation(rates.best_nodes)

_flatten = _operation(flattening.flatten)


def flatten(
    graphs: GraphBatch, num_nodes: np.ndarray, max_depth: np.ndarray, factor: np.ndarray, trust: np.ndarray
) -> FlatTrees:
    """See ``method.flatten.flatten``; the extension returns a plain tuple."""
    return FlatTrees(*_flatten(graphs, num_nodes, max_depth, factor, trust))
