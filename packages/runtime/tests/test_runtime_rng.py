"""Where random operations take their state from: no two chunks from the same place."""

from dataclasses import replace

import pytest

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import chain_program
from piper_ir.errors import JobError
from piper_ir.program import Chunk
from piper_runtime.rank.rng import rng_places


def chunk(id: str, **coords: int) -> Chunk:
    return replace(chain_program(1).chunks[0], id=id, coords=coords)


def test_the_first_chunk_of_a_layer_has_the_layers_place_and_all_others_their_own() -> None:
    chunks = [
        chunk("root"),
        chunk("stage0_layer0", stage=0, layer=0),
        chunk("stage1_layer0", stage=1, layer=0),
        chunk("layer1", layer=1),
        chunk("layer1.1", layer=1),
        chunk("root.1"),
    ]
    places = rng_places(chunks)
    assert list(places.values()) == ["root", 0, "stage1_layer0", 1, "layer1.1", "root.1"]
    assert len(set(places.values())) == len(chunks)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_timeout_that_is_no_time_is_refused(timeout_s: float) -> None:
    plan, job = chain()
    with pytest.raises(JobError, match=r"timeout_s=.*above 0"):
        run(plan, job, steps=1, timeout_s=timeout_s)
