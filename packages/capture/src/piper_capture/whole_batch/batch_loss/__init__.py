"""Write the loss of a microbatch so that microbatches add up to the loss of the whole batch.

`terms` says of each value in the loss how it depends on the rows, `reductions` knows torch's losses and sums and
`calls` other calls. `pairs` writes a mean with a denominator that the batch decides as (sum, weight), `totals` lets a
loss of several means read numbers of the whole batch, `trial` compares the result with the user's loss on numbers, and
`understood` calls them in this order. `wide` keeps counts out of half precision, and `writers` finds changes in place.
"""

from piper_capture.whole_batch.batch_loss.totals import counting
from piper_capture.whole_batch.batch_loss.understood import (
    over_microbatches,
    over_whole_batch,
    with_metrics_of_batch,
)

__all__ = ["counting", "over_microbatches", "over_whole_batch", "with_metrics_of_batch"]
