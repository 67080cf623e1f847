import numpy as np
import pytest

from qwengyre.bench.run_training import flattened
from qwengyre.core import arrays
from qwengyre.testing.training import micro_step, random_execution


@pytest.mark.parametrize("seed", range(3))
def test_flattening_trains_every_token_once_and_computes_every_path_whole(seed):
    rng = np.random.default_rng(seed)
    whole = micro_step("m", 4, *(random_execution(rng, index, advantage=1.0) for index in range(3)))
    alone = list(flattened(whole))
    trajectories = [t for execution in whole.executions for t in execution.trajectories]
    assert [step.executions[0].trajectories for step in alone] == [(t,) for t in trajectories]
    assert [step.num_distinct_tokens for step in alone] == [t.num_tokens for t in trajectories]
    assert len({step.micro_step for step in alone}) == len(trajectories)
    trained = sum(int(arrays.unpack(t.trainable_T, arrays.FLAG).sum()) for step in alone for t in step.executions[0].trajectories)
    assert trained == sum(execution.num_trainable for execution in whole.executions)
