"""Sees everything that a run does and tells it: metrics, summary, the live screen. Changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from qwengyre.core.arrays import FLAG, VERSION, unpack
from qwengyre.core.ids import GroupId
from qwengyre.core.records import End, MicroStep, Validity
from qwengyre.hooks.callbacks import Event
from qwengyre.runtime.executions import GroupPlan
from qwengyre.runtime.records import ExecutionDone
from qwengyre.runtime.step_history import StepHistory
from qwengyre.runtime.tally import Tally
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.telemetry import records as metric
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.learning import Cause, cause_of, note_of, note_of_all
from qwengyre.telemetry.meters import MemoryMeter, WorkMeter
from qwengyre.telemetry.metrics import Metrics, read_metrics
from qwengyre.telemetry.summary import Summary, read_summary, write_summary
from qwengyre.telemetry.view import CellView, Screen, View, estimate_remaining
from qwengyre.trainer.records import AuditReport, MicroStepStats, StepStats, total_of

if TYPE_CHECKING:
    from qwengyre.engines.api import EngineStats
    from qwengyre.gateway.control_api import GatewayReport
    from qwengyre.runtime.fleet import Fleet
    from qwengyre.runtime.gateway_client import GatewayClient
    from qwengyre.runtime.run_config import RunConfig
    from qwengyre.sim.tuning import Replanned

GB = 1e9
POLL_S = 2.0  # metrics and the report need no finer grain, and each poll asks every gateway
DRAW_S = 0.5  # twice a second is enough for a person


class Observer:
    """One per life of the controller; counts go on from the summary of the life before."""

    def __init__(self, config: RunConfig, folder: RunFolder, screen: Screen, now: Callable[[], float], tally: Tally) -> None:
        self._config, self._folder, self._screen, self._now = config, folder, screen, now
        self.metrics = Metrics(folder)
        self.summary = read_summary(folder.summary) or Summary()
        self._memory = MemoryMeter()
        self._roles: dict[int, str] = {}
        self._waterlevel: tuple[int, int] | None = None
        self._tally = tally
        self._members: dict[int, tuple[int, ...]] = {}
        self._step_began: dict[int, float] = {}
        self._tokens_trained = 0
        self._rates = (0.0, 0.0)
        self._memory_gb = 0.0
        self._groups_done = 0
        self._recomputed_at_publish: dict[tuple[int, int], int] = {}
        self._made: dict[tuple[int, int], int] = {}
        """Tokens that each life of a cell had generated when it was last asked."""
        self._recomputed_before = (self.summary.tokens_recomputed_at_publish, self.summary.tokens_recomputed_after_move)
        self._work = WorkMeter((1.0 - self.summary.idle_share) * self.summary.minutes * 60 * num_serving(config))
        self.gateway_restarts = 0
        """In this life: what the gateway counts begins again with each."""
        self.doing = "starting"
        self.tell: Callable[[str, Event], None] = lambda name, event: None
        """Told of what callbacks are called with (`hooks/callbacks.py`)."""
        self._steps = StepHistory()
        self._told: set[Cause] = set()
        """Why steps trained nothing, as far as this life has said it."""
        for record in read_metrics(folder.metrics):
            if isinstance(record, metric.StepFinished):
                self._steps.add(record)

    def began(self, *, resumed: bool, kept: int, redispatched: int) -> None:
        scheduler = self._config.scheduler
        self.metrics.record(
            metric.RunBegan(
                self._now(),
                name=self._config.runtime.name,
                policy=scheduler.policy,
                num_cells=scheduler.num_cells,
                num_steps=scheduler.steps,
                resumed=resumed,
                executions_kept=kept,
                executions_redispatched=redispatched,
            )
        )
        self.summary.executions_lost += redispatched
        if resumed:
            self.say(f"resumed: {kept} finished executions kept, {redispatched} live ones dispatched again")

    def say(self, line: str) -> None:
        self._screen.say(line)

    # ------------------------------------------------------------------ what the scheduler saw and decided

    def see(self, event: ev.Event, commands: Sequence[cmd.AnyCommand], scheduler: Scheduler) -> None:
        state = scheduler.state
        for cell in state.cells.all:
            if self._roles.get(cell.cell) != cell.state.value:
                self._roles[cell.cell] = cell.state.value
                self.metrics.record(metric.RolesChanged(event.at, cell.cell, cell.state.value))
        level = state.waterlevel, state.capacity
        if level != self._waterlevel:
            self._waterlevel = level
            self.metrics.record(metric.WaterlevelSampled(event.at, *level))
        self._tally.see(event, commands, state.steps_done)
        if isinstance(event, ev.GroupReady):
            self._groups_done += 1
        for command in commands:
            if isinstance(command, cmd.OpenStep):
                self._step_began[command.step] = event.at

    def see_plan(self, plan: Replanned) -> None:
        self.metrics.record(metric.PlanAdopted(self._now(), **msgspec.structs.asdict(plan)))
        backlog = f", backlog {plan.backlog:g}" if plan.backlog else ""
        self.say(
            f"plan: {plan.steps_per_burst} steps a burst, {plan.dispatch_depth:g} steps ahead, "
            f"two-way {'on' if plan.two_way else 'off'}{backlog}; {plan.reason}"
        )

    def recount(self, done: Iterable[ExecutionDone]) -> None:
        """Executions that the journal has: the summary may have missed the last ones before a kill."""
        summary = self.summary
        summary.executions_finished = summary.compactions = summary.sub_agents = 0
        summary.calls_moved = summary.timeouts_scored = 0
        for one in done:
            self._count(one)

    def see_execution(self, done: ExecutionDone) -> None:
        self._count(done)
        outcome = done.outcome
        if outcome.validity is not Validity.VALID:
            reason = outcome.detail.strip().splitlines()[:1]
            self.say(f"{done.execution}: {outcome.end.value}, {outcome.validity.value} {' '.join(reason)}")

    def _count(self, done: ExecutionDone) -> None:
        summary = self.summary
        summary.executions_finished += 1
        summary.compactions += done.counts.compactions
        summary.sub_agents += done.counts.sub_agents
        summary.calls_moved += done.counts.calls_moved
        outcome = done.outcome
        if outcome.end is End.HARNESS_TIMEOUT and outcome.validity is Validity.VALID and outcome.score > 0:
            summary.timeouts_scored += 1

    def see_evaluation(self, version: int, plans: Sequence[GroupPlan], done: Mapping[GroupId, Sequence[ExecutionDone]]) -> None:
        sampled: list[float] = []
        greedy: list[float] = []
        for plan in plans:
            scores = [one.outcome.score for one in done[plan.group] if one.outcome.validity is not Validity.DROPPED]
            (sampled if plan.temperature > 0 else greedy).extend(scores)
        score, greedy_score = mean(sampled), mean(greedy)
        num = len(sampled) + len(greedy)
        tasks = len({plan.task for plan in plans})
        evaluated = metric.EvaluationFinished(self._now(), version, score, greedy_score, tasks, num)
        self.metrics.record(evaluated)
        self.tell("on_evaluation", evaluated)
        if version == 0:
            self.summary.score_before, self.summary.greedy_before = score, greedy_score
        self.summary.score_after, self.summary.greedy_after = score, greedy_score
        self.say(f"version {version}: held-out score {score:.3f}, greedy {greedy_score:.3f}")
        self.write_summary()

    # ------------------------------------------------------------------ training

    def see_members(self, step: int, members: tuple[int, ...]) -> None:
        self._members[step] = members

    def see_micro_step(self, cell: int, stats: MicroStepStats) -> None:
        self._work.add(cell, stats.seconds)
        self._tokens_trained += stats.tokens_trained

    def see_step(
        self,
        applied: StepStats,
        computed: Sequence[MicroStepStats],
        taken: Sequence[cmd.TakeGroup],
        micro_steps: Sequence[MicroStep],
        done: Sequence[ExecutionDone],
    ) -> None:
        step, now = applied.step, self._now()
        staleness = [group.staleness for group in taken]
        whole = total_of(f"step {step}", computed)
        tokens = max(1, whole.tokens_trained)
        counted = [one for one in done if one.outcome.validity is not Validity.DROPPED]
        rewards = [one.outcome.score for one in counted]
        self._work.add(0, applied.seconds)
        finished = metric.StepFinished(
            now,
            step=step + 1,
            reward_mean=mean(rewards),
            reward_std=float(np.std(rewards)) if rewards else 0.0,
            num_groups=len(taken),
            num_executions=applied.num_executions,
            members=self._members.pop(step, (0,)),
            joins_mid_step=self._tally.joins[step],
            tokens_trained=whole.tokens_trained,
            tokens_distinct=whole.tokens_distinct,
            loss=whole.loss / max(1, applied.num_executions),
            entropy=whole.entropy / tokens,
            gradient_norm=applied.gradient_norm,
            clip_fraction=whole.trajectories_clipped / max(1, whole.trajectories),
            log_ratio_mean=whole.log_ratio / tokens,
            log_ratio_max=whole.log_ratio_max,
            staleness_mean=mean(staleness),
            staleness_max=max(staleness, default=0),
            token_staleness_mean=token_staleness(micro_steps, step),
            seconds=now - self._step_began.pop(step, now),
            num_trajectories=whole.trajectories,
            token_clip_fraction=whole.tokens_clipped / tokens,
            token_cap_fraction=whole.tokens_capped / tokens,
            deduplication=whole.tokens_flat / whole.tokens_distinct if whole.tokens_distinct else None,
            clip_scale=applied.clip_scale,
            learning_rate=applied.learning_rate,
            update_norm=applied.update_norm,
            num_mixed_groups=num_mixed_groups(counted),
            num_scored=sum(one.outcome.validity is Validity.VALID for one in done),
            num_dropped=len(done) - len(counted),
            num_calls=sum(one.counts.calls for one in done),
        )
        self._steps.add(finished)
        self.metrics.record(finished)
        self.tell("on_step", finished)
        if not applied.applied:
            self.say(f"step {step + 1} was not applied: {applied.reason}")
        self._tell_whether_it_learns(finished)
        self.summary.steps = step + 1
        self.summary.staleness_mean, self.summary.staleness_max = self._steps.staleness_mean, self._steps.staleness_max
        self.summary.clip_fraction = self._steps.clip_fraction
        self.write_summary()

    def _tell_whether_it_learns(self, finished: metric.StepFinished) -> None:
        """As soon as a step trained nothing, for each cause once; the summary and the report have all steps."""
        cause = cause_of(finished)
        if cause is not None and cause not in self._told:
            self._told.add(cause)
            self.say(note_of(finished))
        steps = self._steps.all
        self.summary.steps_that_taught_nothing = sum(cause_of(step) is not None for step in steps)
        self.summary.note = note_of_all(steps)

    def see_switch(self, cell: int, seconds: float) -> None:
        self._work.add(cell, seconds)

    def see_calls(self, report: GatewayReport, engines: Sequence[EngineStats]) -> None:
        """At the end: every token that engines made must be in a record; no client may have seen an error of ours."""
        newest = {cell: max(life for of, life in self._made if of == cell) for cell, _ in self._made}
        earlier = [tokens for (cell, life), tokens in self._made.items() if life < newest[cell]]
        made = sum(engine.tokens_generated for engine in engines) + sum(earlier)
        lost = f" ({len(earlier)} lost engines up to their last heartbeat)" if earlier else ""
        again = " since it was started again" if self.gateway_restarts else ""
        self.say(f"engines made {made} tokens{lost}, the gateway recorded {report.stats.tokens_sampled}{again}")
        self.say(f"calls: {report.stats.calls_started}, answered with an error of ours: {report.stats.server_errors}")

    def see_audit(self, report: AuditReport) -> None:
        gap, tokens = report.max_logprob_gap, report.num_tokens
        self.say(
            f"log-probs of engines and trainer: largest gap {gap:.1e}, mean gap {report.mean_logprob_gap:.1e} over {tokens} tokens"
            f" (largest in {report.worst_execution})"
        )
        self.summary.max_logprob_gap = gap
        self.metrics.record(metric.AuditFinished(self._now(), gap, tokens))
        self.write_summary()

    def ended(self, reason: str) -> None:
        ended = metric.RunEnded(self._now(), reason)
        self.metrics.record(ended)
        self.tell("on_end", ended)
        self.write_summary()
        self.metrics.close()

    def write_summary(self) -> None:
        self._refresh_summary()
        counts = {name: getattr(self.summary, name) for name in COUNTS}
        self.metrics.record(metric.CountsSampled(self._now(), counts))

    def _refresh_summary(self) -> None:
        summary, elapsed = self.summary, self._now()
        summary.minutes = elapsed / 60
        summary.switches_to_training = self._tally.switches_to_training
        summary.switches_to_rollout = self._tally.switches_to_rollout
        summary.joins_mid_step = self._tally.joins_mid_step
        summary.peak_rss_gb = max(summary.peak_rss_gb, self._memory.peak_bytes / GB)
        summary.idle_share = self._work.idle_share(num_cells=num_serving(self._config), elapsed_s=elapsed)
        write_summary(self._folder.summary, summary)

    # ------------------------------------------------------------------ polling and drawing

    async def watch(self, scheduler: Scheduler, fleet: Fleet, gateway: GatewayClient) -> None:
        """Poll and draw until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll(fleet, gateway), name="poll")
            tasks.create_task(self._draw(scheduler, fleet), name="draw")

    async def _poll(self, fleet: Fleet, gateway: GatewayClient) -> None:
        sampled_before, trained_before, at_before = 0, 0, self._now()
        while True:
            await asyncio.sleep(POLL_S)
            self._memory_gb = await asyncio.to_thread(self._memory.sample) / GB
            stats = (await gateway.report()).stats
            now = self._now()
            elapsed = max(1e-3, now - at_before)
            sampled = max(0, stats.tokens_sampled - sampled_before)
            self._rates = sampled / elapsed, (self._tokens_trained - trained_before) / elapsed
            sampled_before, trained_before, at_before = stats.tokens_sampled, self._tokens_trained, now
            self.metrics.record(metric.RatesSampled(now, *self._rates, self._memory_gb))
            self.summary.tokens_recomputed_after_move = self._recomputed_before[1] + stats.tokens_recomputed_after_move
            self._see_health(fleet)
            self._refresh_summary()

    def _see_health(self, fleet: Fleet) -> None:
        for cell, live in fleet.cells.items():
            if live.health is not None:
                self._work.observe(cell, "engine", live.health.engine.busy_s)
                key = cell, live.spec.incarnation
                self._recomputed_at_publish[key] = live.health.engine.tokens_recomputed_at_publish
                self._made[key] = live.health.engine.tokens_generated
        self.summary.tokens_recomputed_at_publish = self._recomputed_before[0] + sum(self._recomputed_at_publish.values())

    async def _draw(self, scheduler: Scheduler, fleet: Fleet) -> None:
        while True:
            self._screen.update(self.view(scheduler, fleet))
            await asyncio.sleep(DRAW_S)

    def view(self, scheduler: Scheduler, fleet: Fleet) -> View:
        state, config = scheduler.state, self._config.scheduler
        cells = []
        for cell in state.cells.all:
            live = fleet.cells.get(cell.cell)
            calls = live.health.capacity.running + live.health.capacity.waiting if live and live.health else 0
            cells.append(CellView(cell.cell, cell.state.value, num_calls=calls))
        return View(
            at=self._now(),
            name=self._config.runtime.name,
            policy=config.policy,
            doing=self.doing,
            step=state.steps_done,
            num_steps=config.steps,
            version=state.version,
            cells=tuple(cells),
            waterlevel=state.waterlevel,
            capacity=state.capacity,
            max_capacity=state.capacity_total,
            groups_done=self._groups_done,
            groups_open=state.groups.num_out,
            executions_finished=self.summary.executions_finished,
            executions_running=sum(len(server.executions) for server in state.placement.servers.values()),
            rewards=self._steps.rewards,
            score_before=self.summary.score_before,
            score_now=self.summary.score_after,
            tokens_per_s=self._rates[0],
            memory_gb=self._memory_gb,
            remaining_s=estimate_remaining(self._steps.ends_s, config.steps),
        )


COUNTS = (
    "switches_to_training",
    "switches_to_rollout",
    "calls_moved",
    "tokens_recomputed_after_move",
    "tokens_recomputed_at_publish",
    "joins_mid_step",
    "compactions",
    "sub_agents",
    "timeouts_scored",
    "executions_finished",
    "executions_lost",
)


def num_serving(config: RunConfig) -> int:
    """Cells and standalone engines: whose time may be idle."""
    return config.scheduler.num_cells + config.scheduler.num_standalone


def num_mixed_groups(done: Iterable[ExecutionDone]) -> int:
    """Groups in which not all scores are equal."""
    scores: dict[GroupId, set[float]] = {}
    for one in done:
        scores.setdefault(one.group, set()).add(one.outcome.score)
    return sum(len(found) > 1 for found in scores.values())


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def token_staleness(micro_steps: Sequence[MicroStep], step: int) -> float:
    """Mean over trained tokens of (weights trained at) - (weights sampled from)."""
    total, num = 0, 0
    for micro_step in micro_steps:
        for execution in micro_step.executions:
            for trajectory in execution.trajectories:
                version = unpack(trajectory.version_T, VERSION)[unpack(trajectory.trainable_T, FLAG)]
                total += int((step - version).sum())
                num += len(version)
    return total / num if num else 0.0
