"""The runner of a rank that has requests of its own and shares experts with others.

It computes its own part of a plan for all ranks, in passes that are the same on every rank
(`joint_step.py`). When a step is collected, all ranks exchange what it has yielded, so that the
loop of each goes on with all results. On GPUs that is beside the next step, and through the CPUs.
"""

from __future__ import annotations

import msgspec

from tiercel.engine_config import EngineConfig
from tiercel.models.model import Model
from tiercel.parallel import Group
from tiercel.request.request import Request
from tiercel.runner.joint_results import pack_results, take_results
from tiercel.runner.joint_step import joint_step, make_scratch_parts
from tiercel.runner.row_state import Rows
from tiercel.runner.runner import Launch, ModelRunner
from tiercel.runner.sampler import Sampler
from tiercel.runner.sampler_output import SampledTokens
from tiercel.runner.step_inputs import BatchBuilder
from tiercel.scheduler.joint import JointOutput
from tiercel.scheduler.plan import SchedulerOutput
from tiercel.spec.drafter_state import Proposer


class JointLaunch(Launch, frozen=True):
    """This rank's part of a step under way; `requests` are those of all ranks."""

    requests: tuple[Request, ...] = ()


class JointRunner(ModelRunner):
    """Runs this rank's part of plans for all ranks; see `ModelRunner`."""

    def __init__(
        self,
        model: Model,
        rows: Rows,
        sampler: Sampler,
        config: EngineConfig,
        batches: BatchBuilder,
        proposer: Proposer | None,
        group: Group,
    ) -> None:
        super().__init__(model, rows, sampler, config, batches, proposer)
        self._group = group
        self._scratch = make_scratch_parts(rows.scratch)

    def launch(self, plan: SchedulerOutput) -> JointLaunch:
        """Enqueue this rank's part of a step, or what it does while others have parts alone."""
        assert isinstance(plan, JointOutput), "of a scheduler for all ranks"
        own = plan.by_rank[self._group.rank]
        if own is None:
            own = SchedulerOutput(plan.step_id, (), (), ((),) * len(self.pools))
        step = joint_step(plan, self._group.rank, self._scratch, self.decode_steps.joint_size)
        own = msgspec.structs.replace(own, step_id=plan.step_id)
        launched = self._launch(own, step.parts, step.shape)
        return JointLaunch(
            launched.sampled,
            launched.readbacks,
            launched.copies,
            tuple(part.request for part in plan.scheduled),
        )

    def collect(self, launch: Launch) -> dict[Request, SampledTokens]:
        """Wait for a launched step; returns the sampled tokens of all ranks' requests.

        Raises:
            RankLostError: another rank did not get here.
        """
        assert isinstance(launch, JointLaunch), "its own"
        own, rank, requests = super().collect(launch), self._group.rank, launch.requests
        packed = pack_results(requests, rank, own, launch.readbacks)
        sampled: dict[Request, SampledTokens] = {}
        for other, data in enumerate(self._group.exchange(packed)):
            sampled |= own if other == rank else take_results(requests, data)
        return sampled
