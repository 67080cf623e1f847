"""Benches: each measures one claim in one run and prints the figures. `qwengyre bench NAME`."""

from typing import Final

COMMANDS: Final = {
    "kv-move": ("qwengyre.bench.kv_move:kv_move", "Moved calls: tokens computed twice, and speed against the bare transport."),
    "weights": ("qwengyre.bench.weights:weights", "Snapshots: speed, cost to the core, torn reads."),
    "role-switch": ("qwengyre.bench.role_switch:role_switch", "A cell to training and back, by phase, against moving the bytes."),
    "device": ("qwengyre.bench.device:device_bench", "A device: shares of its peak, decoding, role switch, KV moves, snapshots."),
    "dashboard": (
        "qwengyre.bench.dashboard:dashboard",
        "A run of 20,000 executions in the dashboard: first answer, memory, cost of an open page.",
    ),
    "dashboard-beside": (
        "qwengyre.bench.dashboard_beside:dashboard_beside",
        "Training with a page of the dashboard open and without, in turn: its time, and its processor time.",
    ),
    "elastic": ("qwengyre.bench.elastic:elastic", "Elastic, Colocate and Async with real processes and emulated devices."),
    "embedded": (
        "qwengyre.bench.embedded:embedded",
        "Tokens per CPU second of the embedded engine, against Hugging Face generate.",
    ),
    "fairness": (
        "qwengyre.bench.fairness:fairness",
        "What an abusive execution costs the calls of others at the gateway, and its heartbeat.",
    ),
    "gateway": (
        "qwengyre.bench.gateway:gateway",
        "Cost of a 700,000-token execution, of 1,000 streams at once, of a small call.",
    ),
    "gateway-delay": (
        "qwengyre.bench.gateway_delay:gateway_delay",
        "What a gateway on one core adds to each chunk of many streams.",
    ),
    "gateways": (
        "qwengyre.bench.gateways:bench_gateways",
        "CPU of a streamed chunk in a gateway and in a plain pass-through; several gateways against one.",
    ),
    "journal": ("qwengyre.bench.journal:journal", "Appends, reads and durable records per second of a journal."),
    "launch": ("qwengyre.bench.launch:launch", "CPU time of starting and scoring one execution, cold and warm."),
    "j-max": ("qwengyre.bench.j_max:j_max", "Time and trained tokens by the cap on trajectories, on recorded executions."),
    "memory": ("qwengyre.bench.memory:memory", "Peak memory of long rows and of large vocabularies."),
    "rivals": (
        "qwengyre.bench.rivals:rivals",
        "Schedules of other systems in the simulator, beside ours under one cap on staleness: table and picture.",
    ),
    "run-training": (
        "qwengyre.bench.run_training:run_training",
        "What a run trained, once more: trees against flattened paths.",
    ),
    "simulator": (
        "qwengyre.bench.simulator:simulator",
        "CPU time of simulated events, up to 10,000 cells and 1,000,000 executions.",
    ),
    "tree-training": (
        "qwengyre.bench.tree_training:tree_training",
        "One tree row against its flattened paths: CPU time, peak memory, exactness.",
    ),
    "tuning": (
        "qwengyre.bench.tuning:tuning",
        "Simulated runs that begin badly and plan again by themselves, against the best plan.",
    ),
}
"""Name -> ("module:function", one line of help)."""
