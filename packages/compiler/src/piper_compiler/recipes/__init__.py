"""Hold the recipes, functions that return a tuple of directives: published pipeline schedules, a family per file.

They may import directives, `actions` and piper_ir; `from_csv` also imports `interchange`, when it is called. A schedule
is data: no pass knows any recipe.
"""

from piper_compiler.actions import Action
from piper_compiler.directives.partition import stages_of
from piper_compiler.recipes.basic import (
    context_parallel,
    data_parallel,
    expert_parallel,
    gpipe,
    one_f_one_b,
    pipeline,
    recomputation,
    stage_orders,
    tensor_parallel,
)
from piper_compiler.recipes.dualpipe import dualpipe, dualpipe_v
from piper_compiler.recipes.from_csv import from_csv
from piper_compiler.recipes.interleaved import interleaved, looped_bfs
from piper_compiler.recipes.registry import RECIPES, Recipe, recipe
from piper_compiler.recipes.scheduled import scheduled
from piper_compiler.recipes.zbv import zbv
from piper_compiler.recipes.zero_bubble import v_frontier, v_half, v_min, zero_bubble
from piper_compiler.recipes.zero_bubble_1f1b import interleaved_zb, zb_h1, zb_h2

__all__ = [
    "RECIPES",
    "Action",
    "Recipe",
    "context_parallel",
    "data_parallel",
    "dualpipe",
    "dualpipe_v",
    "expert_parallel",
    "from_csv",
    "gpipe",
    "interleaved",
    "interleaved_zb",
    "looped_bfs",
    "one_f_one_b",
    "pipeline",
    "recipe",
    "recomputation",
    "scheduled",
    "stage_orders",
    "stages_of",
    "tensor_parallel",
    "v_frontier",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zbv",
    "zero_bubble",
]
