"""Whole runs on a person's own iterator: a stop in between, and several processes."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import own_data
import pytest

from amsp_jax import UserError

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return {kind: own_data.main(tmp_path_factory.mktemp(kind) / "run", kind, "0") for kind in ("mine", "grain")}


@pytest.mark.parametrize("kind", ["mine", "grain"])
def test_a_run_that_was_stopped_continues_with_the_right_batch(undisturbed, tmp_path, kind):
    first = own_data.main(tmp_path / "run", kind, "2")
    assert len(first["loss"]) == 2
    assert own_data.main(tmp_path / "run", kind, "0") == undisturbed[kind]


@pytest.mark.parametrize(
    ("kind", "cause", "words"),
    [
        ("ending", type(None), r"from_iterator\(Ending\) ended after 3 batches"),
        ("failing", KeyError, r"data=from_iterator\(Failing\), step 4: it raised KeyError: 'page 7'"),
    ],
)
def test_what_was_trained_is_saved_where_the_data_fail(undisturbed, tmp_path, kind, cause, words):
    with pytest.raises(UserError, match=f"{words}.*; step 3 is saved in") as raised:
        own_data.main(tmp_path / "run", kind, "0")
    assert isinstance(raised.value.__cause__, cause)
    # The same data, mended.
    assert own_data.main(tmp_path / "run", "mine", "0") == undisturbed["mine"]


def two_processes(run_dir, stop_after):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, own_data.__file__, run_dir, "mine", stop_after, address]
    children = [subprocess.Popen([*command, str(i)], env=environ, stdout=-1, stderr=-1, text=True) for i in range(2)]
    outputs = [child.communicate(timeout=240) for child in children]
    assert not any(child.returncode for child in children), outputs[0][1][-3000:]
    return json.loads(outputs[0][0].split("RESULT")[1])


@pytest.mark.slow
def test_two_processes_with_their_own_iterators_give_the_numbers_of_one(undisturbed, tmp_path):
    two_processes(tmp_path / "run", "2")
    with pytest.raises(UserError, match="2 processes, and this run has 1"):
        own_data.main(tmp_path / "run", "mine", "0")
    both = two_processes(tmp_path / "run", "0")
    assert len(both["loss"]) == 6
    for name in ("loss", "validation"):
        np.testing.assert_allclose(both[name], undisturbed["mine"][name], rtol=1e-5)
