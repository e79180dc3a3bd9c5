"""Make the initial tensors of a model one at a time: by its recorded constructor, or from files of weights.

May import: nothing of the runtime.
"""

from piper_runtime.weights.lazy_tensors import (
    LazyTensors,
    TensorForm,
    flat_range,
    forms_of,
    matched,
    part_of,
)
from piper_runtime.weights.recorder import is_fake, record
from piper_runtime.weights.recording import Recording, draw_seed
from piper_runtime.weights.renaming import (
    HeldTensor,
    Into,
    Renames,
    RenameTarget,
    placed,
    rename_problem,
)
from piper_runtime.weights.shared_memory import check_separate
from piper_runtime.weights.weight_files import is_weight_file, stored_tensors

__all__ = [
    "HeldTensor",
    "Into",
    "LazyTensors",
    "TensorForm",
    "Recording",
    "RenameTarget",
    "Renames",
    "check_separate",
    "draw_seed",
    "flat_range",
    "is_fake",
    "is_weight_file",
    "forms_of",
    "matched",
    "part_of",
    "placed",
    "record",
    "rename_problem",
    "stored_tensors",
]
