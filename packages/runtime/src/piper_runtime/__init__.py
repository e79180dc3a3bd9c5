"""Execute a plan: in one process (inline), in one process per rank (processes), or in one Ray actor per rank (ray).

Other packages import names from here or from one of the folders, which build on each other in this order: `data`,
`weights`, `rank`, `checkpoint`, `engine`, `transport`, `profile`, `launch`. Importing this package does not import Ray.
"""

from piper_runtime.checkpoint import Checkpoints
from piper_runtime.launch import Run, execute
from piper_runtime.rank import Float8, Job, LossScale, Precision, rng_seed

__all__ = ["Checkpoints", "Float8", "Job", "LossScale", "Precision", "Run", "execute", "rng_seed"]
