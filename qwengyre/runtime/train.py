"""`qwengyre train`: put the parts together, run, audit, report."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.cell import api
from qwengyre.cell.cell import CellSpec
from qwengyre.config.harness_rules import read_harness_rules
from qwengyre.core.errors import CellFailed
from qwengyre.core.ids import CORE, ExecutionId
from qwengyre.core.records import MicroStep
from qwengyre.gateway.config import GatewayProcessConfig
from qwengyre.gateway.keys import load_secret
from qwengyre.hooks.callbacks import Callbacks
from qwengyre.hooks.in_controller import ControllerHooks
from qwengyre.hooks.judge import Judge
from qwengyre.hooks.views import Decode
from qwengyre.journal import Journal, read
from qwengyre.launchers import open_launcher
from qwengyre.rpc import tls
from qwengyre.runtime.check import check_run
from qwengyre.runtime.controller import Controller, RunParts, members_of
from qwengyre.runtime.driver import RunClock
from qwengyre.runtime.executions import Executions, ExecutionSettings, RunsExecutions
from qwengyre.runtime.fleet import Fleet
from qwengyre.runtime.gateway_client import GatewayClient
from qwengyre.runtime.gateway_process import GatewayProcess
from qwengyre.runtime.hosts import HarnessHosts
from qwengyre.runtime.notes import worth_knowing
from qwengyre.runtime.observer import Observer
from qwengyre.runtime.prepare import Prepared, keep_policy, prepare
from qwengyre.runtime.records import ControllerRecord, RunOpened
from qwengyre.runtime.recovery import Recovered, key_of, recover
from qwengyre.runtime.run_config import RunConfig
from qwengyre.runtime.sourcing import Sourcing
from qwengyre.runtime.steps import Steps
from qwengyre.runtime.trackers import Trackers
from qwengyre.sandbox.harbor.launcher import HarborLauncher, TrialFolders
from qwengyre.sandbox.harness import GatewayAddress
from qwengyre.sandbox.host_wire import HostSpec
from qwengyre.sandbox.launcher import Launcher
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.log_lines import log_to
from qwengyre.telemetry.records import FINISHED
from qwengyre.telemetry.summary import Summary
from qwengyre.telemetry.view import Screen
from qwengyre.trainer.records import AuditReport
from qwengyre.trajectory.harness_rules import HarnessRules
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.shm import cleanup

log = logging.getLogger(__name__)
AUDIT_BATCH = 64  # micro-steps of one request: bounds the size of a message
SEGMENTS: Final = re.compile(r"qwengyre-[0-9a-f]{16}")
SECRET_BYTES = 32


class Journals(msgspec.Struct, frozen=True):
    """What this process alone may write to. Opened before anything else of the run is touched: whoever resumes a run that goes on is
    refused here, and leaves its metrics as they are."""

    controller: Journal
    trained: Journal


def train(
    config: RunConfig, folder: RunFolder, screen: Screen, *, begun: RunConfig | None = None, changes: Sequence[str] = ()
) -> Summary:
    """Run to the end, from the beginning or from where a stop left it; what came of it.

    Of a run that is resumed `begun` is what it began with, and `changes` are what `config` has from the command line since.

    Raises QwenGyreErrors for what the user can mend.
    """
    log_to(folder.logs / "controller.log")
    check_run(config, folder.path)
    tls.use(config.tls)
    for line in (f"run folder: {folder.path}", *(f"note: {note}" for note in worth_knowing(config))):
        screen.announce(line)
    prepared = prepare(config, screen.progress)
    began_with = scheduler_begun(prepared.scheduler, begun or config)
    with (
        Journal.open(folder.controller_journal, ControllerRecord) as controller,
        Journal.open(folder.trained_journal, MicroStep) as trained,
    ):
        keep_policy(prepared.model_dir, folder)
        config = keep_renderer_of_run(config, prepared.model_dir, folder)
        if config.trajectory.harness_rules:
            folder.harness_rules.write_bytes(Path(config.trajectory.harness_rules).read_bytes())
        recovered = recover(folder.controller_journal, began_with)
        recovered.changes = tuple(changes)
        run = Run(config, folder, screen, prepared, Journals(controller, trained), recovered)
        asyncio.run(run.run())
        return run.observer.summary


def segment_prefix(run: Path) -> str:
    """Of the shared memory of all lives of the run in this folder: one that was killed leaves it to the next to remove.

    Drawn once for each run, and kept with its secrets: every user of the machine may make files where this memory is.
    """
    kept = RunFolder(run).segments
    if kept.is_file() and SEGMENTS.fullmatch(name := kept.read_text(encoding="utf-8", errors="replace")):
        return name
    name = f"qwengyre-{secrets.token_hex(8)}"
    kept.unlink(missing_ok=True)
    kept.touch(mode=0o600, exist_ok=False)
    kept.write_text(name, encoding="utf-8")
    return name


class Run:
    """One life of the controller, from its first process to its report."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        screen: Screen,
        prepared: Prepared,
        journals: Journals,
        recovered: Recovered,
    ) -> None:
        self.config, self.folder, self.screen, self.prepared, self.journals = config, folder, screen, prepared, journals
        self.shared = RunFolder(folder.path.absolute())
        """As the cells see it, whatever folder they were started in."""
        self.recovered = recovered
        self.reconfigured = recovered.changes_to(prepared.scheduler) if recovered.has_started else {}
        self.clock = RunClock(self.recovered.at)
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.segments = segment_prefix(self.shared.path)
        self._hosts: HarnessHosts | None = None
        self.observer = Observer(config, folder, screen, self.clock.now, self.recovered.tally)

    async def run(self) -> None:
        reason = "stopped"
        cleanup(self.segments)  # of a life that was killed
        loop = asyncio.get_running_loop()
        callbacks = Callbacks(self.prepared.hooks.callbacks, self.folder.path, partial(say_from_thread, loop, self.observer.say))
        self.observer.tell = callbacks.tell
        trackers = Trackers(self.config.tracking, self.folder, self.observer.say)
        trackers.start()
        try:
            async with AsyncExitStack() as stack:
                controller = await self._assemble(stack)
                watching = asyncio.create_task(
                    self.observer.watch(controller.driver.scheduler, controller.fleet, controller.gateway), name="watch"
                )
                watching.add_done_callback(note_end_of_watch)
                try:
                    await self._while_gateway_lives(self._drive(controller))
                    await self._while_gateway_lives(self._audit(controller))
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
            reason = FINISHED
        except BaseException as error:
            reason = reason if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)) else f"failed: {error}"
            raise
        finally:
            self.observer.ended(reason)
            await trackers.finish()
            await asyncio.to_thread(callbacks.close, self.config.hooks.timeout_s)
            cleanup(self.segments)

    async def _assemble(self, stack: AsyncExitStack) -> Controller:
        config, folder = self.config, self.folder
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qwengyre-")))
        gateways = self._gateways = [
            GatewayProcess(self._gateway_config(number, private), private, folder.logs, config.runtime)
            for number in range(config.gateway.processes)
        ]
        journal, trained = self.journals.controller, self.journals.trained
        for cut in (journal.cut, trained.cut):
            if cut is not None:
                self.observer.say(str(cut))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        journal.append(RunOpened(self.recovered.lives, self.recovered.at, now, self.recovered.changes))
        load_secret(self.folder.journal / "secret")  # made once, before gateways look for it side by side
        for one in gateways:
            stack.push_async_callback(one.stop)
        async with asyncio.TaskGroup() as starting:
            for one in gateways:
                starting.create_task(one.start(), name=f"start gateway {one.number}")
        gateway = GatewayClient([one.control_socket for one in gateways], config.runtime.operation_timeout_s)
        stack.callback(gateway.close)
        runtime = config.runtime
        cells = await open_launcher(runtime.launcher, config.ray, private, self.shared.logs, runtime.start_timeout_s)
        stack.push_async_callback(cells.close)
        fleet = Fleet(self._cell_spec, cells, config.runtime, gateway, config.scheduler.num_cells)
        stack.push_async_callback(fleet.stop)
        launcher = await self._open_launcher(private, stack)
        parts = RunParts(
            scheduler=self.recovered.scheduler,
            journal=journal,
            trained=trained,
            clock=self.clock,
            fleet=fleet,
            gateway=gateway,
            executions=self._executions(gateway, launcher),
            steps=self._steps(fleet, journal),
            observer=self.observer,
            order=self.prepared.order,
            evaluation=self.prepared.evaluation,
            history=self.recovered.history,
            judged=self.recovered.judged,
            sourcing=self._sourcing(),
        )
        controller = Controller(config, parts)
        for one in gateways:
            one.on_restarted = partial(self._gateway_restarted, controller, one.number)
        return controller

    async def _open_launcher(self, private: Path, stack: AsyncExitStack) -> RunsExecutions:
        """What runs harnesses: this process, or hosts of its own."""
        config, kept, num_hosts = self.config, self.folder.workspaces, self.config.sandbox.hosts
        gateways = tuple(GatewayAddress(one.harness_socket, config.gateway.url(one.number, one.port)) for one in self._gateways)
        work = private / "work"
        if config.sandbox.kind == "harbor":
            folders = TrialFolders(work, kept, kept, self.folder.logs / "trial-host.log")
            most = config.runtime.max_concurrent_harnesses
            return await stack.enter_async_context(
                HarborLauncher(config.sandbox.harbor, config.harness, gateways, folders, max_agents=most)
            )
        if not num_hosts:
            return await stack.enter_async_context(Launcher(config.harness, gateways, work=work, failed=kept, sample=kept))
        shares = config.harness.shared_by(num_hosts)

        def make_spec(number: int, incarnation: int) -> HostSpec:
            name = str(private / f"host-{number}-{incarnation}")
            return HostSpec(shares, gateways, f"{name}.work", str(kept.absolute()), f"{name}.sock", f"{name}.ready")

        hosts = self._hosts = HarnessHosts(num_hosts, make_spec, private, self.folder.logs, config.runtime)
        hosts.on_lost = self.observer.say
        stack.push_async_callback(hosts.stop)
        await hosts.start()
        return hosts

    async def _gateway_restarted(self, controller: Controller, gateway: int) -> None:
        self.observer.gateway_restarts += 1
        await controller.gateway_restarted(gateway)

    def _executions(self, gateway: GatewayClient, launcher: RunsExecutions) -> Executions:
        rules, most = read_harness_rules(self.config.trajectory.harness_rules), self.config.runtime.max_concurrent_harnesses
        if self.config.sandbox.kind == "harbor":  # counts its own: from an agent's start to its end
            most = max(most, self.config.sandbox.harbor.max_trials)
        executions = Executions(gateway, launcher, self.prepared.tasks, self._settings(), rules, max_concurrent=most)
        executions.hooks = self._controller_hooks(rules)
        return executions

    def _sourcing(self) -> Sourcing | None:
        prepared = self.prepared
        if prepared.hooks.source is None:
            return None
        held_out, journal = prepared.evaluation.tasks, self.journals.controller
        return Sourcing(self.config, prepared.hooks, prepared.tasks, held_out, journal, self.recovered.chosen)

    def _settings(self) -> ExecutionSettings:
        policy, engine = self.config.policy, self.config.engine
        return ExecutionSettings(
            seed=self.config.runtime.seed,
            max_context_tokens=min(policy.max_context_tokens, engine.max_context_tokens),
            max_tokens_per_call=policy.max_tokens_per_call,
        )

    def _controller_hooks(self, rules: Sequence[HarnessRules]) -> ControllerHooks:
        config, loaded = self.config, self.prepared.hooks
        judged_by = loaded.group_filter, loaded.advantage, loaded.choice
        judge = Judge(*judged_by, config.trajectory, seed=config.runtime.seed, rules=rules)

        def open_decode() -> Decode:
            from qwengyre.gateway.tokenizer import FastTokenizer

            tokenizer = FastTokenizer.from_folder(self.folder.policy)
            return lambda ids: tokenizer.decode(list(ids))

        return ControllerHooks(config.hooks, loaded, judge, open_decode)

    def _gateway_config(self, number: int, private: Path) -> GatewayProcessConfig:
        gateway = self.config.gateway
        port = gateway.port + number if gateway.port else 0
        return GatewayProcessConfig(
            model=str(self.prepared.model_dir),
            journal=str(self.folder.gateway_journal_of(number)),
            secret_file=str(self.folder.journal / "secret"),
            control_socket=str(private / f"control-{number}.sock"),
            harness_socket=str(private / f"harness-{number}" / "harness.sock"),
            port=port if self.config.has_harnesses_outside else None,
            ready_file=str(private / f"gateway-{number}.ready"),
            number=number,
            harness_rules=self.config.trajectory.harness_rules,
            tls=self.config.tls,
            gateway=gateway,
        )

    def _steps(self, fleet: Fleet, journal: Journal) -> Steps:
        return Steps(
            fleet,
            self.shared,
            self.config.runtime,
            on_poisoned=journal.append,
            has_trainers=self.config.scheduler.steps > 0,
            fanout=self._transfer().most_copies,
        )

    def _transfer(self) -> TransferConfig:
        return self.config.transfer.resolved(one_host=self.config.runtime.launcher == "local")

    def _cell_spec(self, cell: int, incarnation: int) -> CellSpec:
        config = self.config
        return CellSpec(
            cell=cell,
            incarnation=incarnation,
            model_dir=str(self.prepared.model_dir),
            segment_prefix=self.segments,
            secret=self.secret,
            threads=config.runtime.threads_per_cell,
            engine=config.engine,
            trainer=config.trainer,
            collective_timeout_s=config.runtime.collective_timeout_s,
            has_trainer=cell < config.scheduler.num_cells and config.scheduler.steps > 0,
            tls=config.tls,
            transfer=self._transfer(),
            token_loss=token_loss.ref if (token_loss := self.prepared.hooks.token_loss) is not None else None,
        )

    # ------------------------------------------------------------------ the run itself

    async def _while_gateway_lives(self, work: Coroutine[None, None, None]) -> None:
        """Carry out `work`. Raises what the gateway failed with for good, as soon as it does."""
        working = asyncio.create_task(work, name="work")
        watched = [*self._gateways, *([self._hosts] if self._hosts is not None else ())]
        failing = [asyncio.create_task(one.wait_failed(), name="failure") for one in watched]
        try:
            done, _ = await asyncio.wait({working, *failing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*(one for one in failing if one in done), working):
                task.result()
        finally:
            for task in (working, *failing):
                task.cancel()
            await asyncio.gather(working, *failing, return_exceptions=True)

    async def _drive(self, controller: Controller) -> None:
        num_processes = self.config.scheduler.num_cells + self.config.scheduler.num_standalone
        self.observer.doing = "starting cells"
        if not self.recovered.has_started:
            await asyncio.gather(*(controller.fleet.start(cell) for cell in range(num_processes)))
            await controller.steps.checkpoint(0, controller.driver.journal.position)
            self.observer.began(resumed=False, kept=0, redispatched=0)
            controller.post(ev.RunStarted)
            self.observer.doing = "training" if self.config.scheduler.steps else "evaluation"
            await controller.run()
            return
        await self._resume(controller)

    async def _resume(self, controller: Controller) -> None:
        """Tell the scheduler what the stop cost, then give every cell a new life."""
        for command in self.recovered.dispatches:
            if (choosing := controller.dispatch(command)) is not None:
                await choosing
        controller.done.update(self.recovered.done)
        for plan in [plan for plan in controller.plans.values() if plan.kind == "train"]:
            if all(execution in controller.done for execution in members_of(plan)):
                controller.see_ended(plan.group)
        self.observer.recount(self.recovered.done.values())
        events = self.recovered.events_of_the_stop()
        if self.reconfigured:
            events.append(msgspec.structs.replace(ev.Reconfigured(at=self.recovered.at), **self.reconfigured))
            self.observer.say(
                f"from now on: {', '.join(f'{key_of(name)} = {value}' for name, value in self.reconfigured.items())}"
            )
        lost = sum(isinstance(event, ev.ExecutionLost) for event in events)
        self.observer.began(resumed=True, kept=len(self.recovered.done), redispatched=lost)
        controller.steps.published_version = self.recovered.scheduler.state.version
        controller.executions.outcomes.update({execution: done.outcome for execution, done in self.recovered.done.items()})
        await self._prepare_again(controller)
        controller.pending = commands_of_the_stop([controller.driver.decide(event) for event in events], self.recovered.scheduler)
        self.observer.doing = "training" if self.config.scheduler.steps else "evaluation"
        await controller.run(restart=range(self.config.scheduler.num_cells + self.config.scheduler.num_standalone))

    async def _prepare_again(self, controller: Controller) -> None:
        """Cut the micro-steps of groups again that were ready and that no durable step has consumed."""
        state = self.recovered.scheduler.state
        waiting = set(state.groups.unprepared())
        for plan in controller.plans.values():
            members = members_of(plan)
            is_complete = all(execution in controller.done for execution in members) and plan.group not in waiting
            is_consumed = self.recovered.taken.get(plan.group, state.steps_done) < state.durable_step
            if plan.kind == "train" and is_complete and not is_consumed:
                await controller.cut_micro_steps(plan.group)

    async def _audit(self, controller: Controller) -> None:
        """Compare what engines recorded with a trainer's forward, for everything that was trained, over all lives."""
        self.observer.see_calls(await controller.gateway.report(), await controller.fleet.engine_stats())
        if not self.config.runtime.audit_logprobs:
            return
        self.observer.doing = "audit"
        micro_steps = {record.micro_step: record for _, record in read(self.folder.trained_journal, MicroStep)}
        batch = list(micro_steps.values())
        report = None
        for start in range(0, len(batch), AUDIT_BATCH):
            operation = api.Audit(tuple(batch[start : start + AUDIT_BATCH]), str(self.shared.snapshots))
            found = await self._audit_on_any(controller.fleet, operation)
            report = found if report is None else merge(report, found)
        if report is not None:
            self.observer.see_audit(report)

    async def _audit_on_any(self, fleet: Fleet, operation: api.Audit) -> AuditReport:
        """On the core, or, when it is lost, on the next cell: the snapshots are files. Raises CellFailed when all are lost."""
        for cell in sorted(cell for cell in fleet.cells if cell < self.config.scheduler.num_cells):
            try:
                return (await fleet.call(cell, operation, api.Audited, self.config.runtime.compute_timeout_s)).report
            except CellFailed as error:
                log.warning("audit_goes_on_elsewhere", extra={"cell": cell, "reason": error.reason})
        raise CellFailed(CORE, "is lost, and so are all others that could audit: go on with --resume")


def scheduler_begun(scheduler: SchedulerConfig, begun: RunConfig) -> SchedulerConfig:
    """`scheduler` with what may change in a run as it was when the run began: what its journal is replayed with."""
    evaluation = {"evaluation_every_steps": begun.evaluation.every_steps, "evaluate_at_end": begun.evaluation.at_end}
    values = {name: evaluation.get(name, getattr(begun.scheduler, name)) for name in ev.CHANGEABLE}
    return msgspec.structs.replace(scheduler, **values)


def commands_of_the_stop(decided: Sequence[Sequence[cmd.AnyCommand]], scheduler: Scheduler) -> list[cmd.AnyCommand]:
    """What to start after the scheduler has heard, event by event, that every cell is lost.

    Commands to a cell were void with the next loss. Of several routes of one execution the last holds. A run that had finished
    finishes again: it was stopped before its report.
    """
    routes: dict[ExecutionId, cmd.AnyCommand] = {}
    others: list[cmd.AnyCommand] = []
    for command in (command for commands in decided for command in commands):
        match command:
            case cmd.Route() | cmd.Hold():
                routes[command.execution] = command
            case cmd.PrepareGroup() | cmd.Ticketed():
                pass  # void, or among those awaited
            case _:
                others.append(command)
    if scheduler.state.is_finished:
        others.append(cmd.FinishRun(scheduler.state.steps_done))
    return [*routes.values(), *others, *scheduler.awaited()]


def say_from_thread(loop: asyncio.AbstractEventLoop, say: Callable[[str], None], line: str) -> None:
    """A line that another thread has to say. None after the loop's end."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(say, line)


def note_end_of_watch(watching: asyncio.Task[None]) -> None:
    """Metrics and screen stand still from here on; the run goes on, and its log says why nothing moves."""
    if not watching.cancelled() and (error := watching.exception()) is not None:
        log.error("watch_ended", exc_info=error)


def keep_renderer_of_run(config: RunConfig, model_dir: Path, folder: RunFolder) -> RunConfig:
    """Resolve `gateway.renderer` once: the gateway, and whoever opens the run or one of its checkpoints, render alike.

    Raises ConfigError when the model's folder does not tell its renderer.
    """
    from qwengyre.gateway.templates.found import keep_renderer, settings_for
    from qwengyre.gateway.tokenizer import FastTokenizer

    source = folder.policy if folder.renderer.is_file() else model_dir
    settings = settings_for(source, FastTokenizer.from_folder(source), config.gateway.renderer)
    keep_renderer(folder.policy, settings)
    gateway = msgspec.structs.replace(config.gateway, renderer=dict(settings))
    return msgspec.structs.replace(config, gateway=gateway)


def merge(one: AuditReport, other: AuditReport) -> AuditReport:
    """Two audits as one: the larger gap, the mean over all tokens."""
    num = one.num_tokens + other.num_tokens
    worse = one if one.max_logprob_gap >= other.max_logprob_gap else other
    mean = (one.mean_logprob_gap * one.num_tokens + other.mean_logprob_gap * other.num_tokens) / max(1, num)
    return msgspec.structs.replace(worse, num_tokens=num, mean_logprob_gap=mean)
