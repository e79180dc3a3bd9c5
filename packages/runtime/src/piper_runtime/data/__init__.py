"""Make batch functions of datasets and streams: which sample is which row follows from the step alone.

May import: nothing of the runtime.
"""

from piper_runtime.data.batch_source import BatchSource, bind_batch, check_data_replicas
from piper_runtime.data.from_dataset import DatasetBatch, from_dataset
from piper_runtime.data.from_stream import StreamBatch, from_stream
from piper_runtime.data.permutation import Permutation

__all__ = [
    "BatchSource",
    "DatasetBatch",
    "Permutation",
    "StreamBatch",
    "bind_batch",
    "check_data_replicas",
    "from_dataset",
    "from_stream",
]
