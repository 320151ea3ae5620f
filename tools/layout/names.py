"""What things are called: tables of renames, by the names that they have before.

``SYMBOLS`` are classes, functions and constants of modules; ``MEMBERS`` methods, attributes and
fields of classes (what overrides or implements them follows); ``MEMBER_WORDS`` attributes of that
name of whatever class of the package; ``WORDS`` parameters and local variables.
"""

from __future__ import annotations

from typing import Any

SYMBOLS: dict[str, str] = {
    # --- runtime
    "runtime.apart.Apart": "AliasCheck",
    "runtime.bell.Bell": "AutoResetEvent",
    "runtime.turns.Turns": "ProgressLoop",
    "runtime.lane.PlannedLane": "PlanExecutor",
    "runtime.lane._Flight": "_InFlight",
    "runtime.lane._members": "_tensor_names",
    "runtime.talk.Talk": "ControlChannel",
    "runtime.talk.Agenda": "CollectiveLock",
    "runtime.envelope.seal": "encode_tagged",
    "runtime.envelope.unseal": "decode_tagged",
    "runtime.envelope._parts": "_split_tag",
    "runtime.gathering.Gathering": "GradientTracker",
    "runtime.gathers.Gathers": "AllGatherState",
    "runtime.whole.WholeGradients": "GradientAssembler",
    "runtime.border.Border": "StepSynchronizer",
    "runtime.border.exchange": "exchange_payloads",
    "runtime.extra.reduce_extra": "reduce_unplanned",
    "runtime.extra._Settling": "_EnqueuedWork",
    "runtime.extra._send": "_send_unplanned",
    "runtime.slot.Slot": "BufferView",
    "runtime.slot.Source": "GradientRef",
    "runtime.slot.NOWHERE": "EMPTY_VIEW",
    "runtime.marks.StepMarks": "StepTimestamps",
    "runtime.marks.Stamp": "Timestamp",
    "runtime.marks.Measured": "MeasuredStep",
    "runtime.marks.UNREAD": "NOT_MEASURED",
    "runtime.marks.read": "to_seconds",
    "runtime.profile.Stamps": "StepTimes",
    "runtime.steps.Gather": "GatherRequest",
    "runtime.passes.Passes": "AccumulationCounter",
    "runtime.places.Place": "RankStatus",
    "runtime.places.LanePlace": "LaneStatus",
    "runtime.places.entangled": "find_deadlock",
    "runtime.places.told": "describe_statuses",
    "runtime.inquiry.Inquiry": "DeadlockDetector",
    "runtime.medium.Medium": "Transport",
    "runtime.medium.HostMedium": "HostTransport",
    "runtime.device_medium.DeviceMedium": "DeviceTransport",
    "runtime.direct.Arrangement": "BufferLayout",
    "runtime.direct.memory": "memory_at",
    "runtime.side_flags.SideFlags": "HostFlags",
    "runtime.flags.NUM_BORDER": "NUM_STEP_FLAGS",
    "runtime.flags.Arrival": "GroupFlags",
    "runtime.flags.Flags": "FlagCodec",
    "runtime.shards._Blocks": "_ShardBlocks",
    "runtime.shards.Table": "ShardTable",
    "runtime.device_buffers._Blocks": "_DeviceShardBlocks",
    "runtime.device_buffers.Beside": "AttachedFlags",
    "runtime.device_buffers._Both": "_GroupAndFlags",
    "runtime.matching.agree": "check_consistent",
    "runtime.matching.shown": "describe_array",
    "runtime.matching.native": "in_native_order",
    "runtime.matching.kind": "dtype_key",
    "runtime.matching.flat": "flattened",
    "runtime.refusals.telling_others": "sharing_argument_errors",
    "runtime.refusals.check_refusals": "check_argument_errors",
    "runtime.refusals._REFUSED": "_ARGUMENT_ERROR",
    "runtime.settings.agree_on_settings": "check_settings",
    "runtime.settings._shown": "_describe_setting",
    "runtime.rows.gather": "gather_rows",
    "runtime.rows.scatter": "scatter_rows",
    "runtime.rows.exchange": "exchange_blocks",
    "runtime.rows.gather_bytes": "gather_row_bytes",
    "runtime.drift.Drift": "DriftDetector",
    "runtime.report.report": "make_report",
    "runtime.thread._BATON_S": "_DRIVER_POLL_S",
    # --- comm
    "comm.mpi_channel.Family": "ProgressGroup",
    "comm.mpi_jobs.Library": "LibraryCollective",
    "comm.mpi_jobs.GatherBytes": "BytesGather",
    "comm.mpi_exchange.Exchange": "DirectReduce",
    "comm.mpi_exchange.Gather": "DirectGather",
    "comm.mpi_routes.Situation": "Topology",
    "comm.mpi_routes.Routes": "Routing",
    "comm.host_memory.Room": "FreeList",
    "comm.host_memory.HostMemory": "SharedMemory",
    "comm.host_memory._Block": "_AddressedMemory",
    "comm.host_board.Board": "SharedFlags",
    "comm.host_board.NUM_BOARDS": "NUM_FLAG_SETS",
    "comm.host_board._BOARD_BYTES": "_FLAG_SET_BYTES",
    "comm.host_reduce.HostReduce": "SharedReduceJob",
    "comm.host_reduce.HostReduces": "SharedAllReduce",
    "comm.host_files.excuse": "known_reason",
    "comm.host_files.explain": "log_reason",
    "comm.host_files.make": "make_file",
    "comm.local._Fate": "_WorldState",
    "comm.device_choice.obstacle": "nccl_obstacle",
    # --- core
    "core.planners.settled.Settled": "PhasePartitions",
    "core.planners.settled.Settler": "PartitionOptimizer",
    "core.planners.settled.plan_of": "plan_of_partitions",
    "core.planners.coarse.even_marks": "even_progress",
    "core.planners.coarse.spread": "spread_borders",
    "core.planners.hybrid_shared._Shared": "_SharedSearch",
    "sim.simulate._Flight": "_InFlight",
    # --- cuda
    "cuda.streams.entered": "stream_context",
    "cuda.streams._Foreign": "_ForeignStream",
    # --- torch
    "torch.nature.Nature": "UpdateCoupling",
    "torch.nature.nature_of": "probe_optimizer",
    "torch.arguments.chosen_nature": "chosen_coupling",
    "torch.lookups.Asked": "LookupRecorder",
    "torch.isolation.undisturbed": "global_state_kept",
    "torch.isolation.same": "nearly_equal",
    "torch.isolation.private": "private_copy",
    "torch.witness.Witness": "GradientGuard",
    "torch.late_sample.LateSample": "DeviceGradientGuard",
    "torch.wrapper.Asked": "SyncState",
    "torch.wrapper.Distributed": "DistributedOptimizerBase",
    "torch.exchange.Exchange": "OptimizerSync",
    "torch.gradients.Gradients": "GradientHooks",
    "torch.forward.ForwardClock": "ForwardProfiler",
    "torch.update.apart": "copied_groups",
    "torch.original.overlay": "patch_original",
    "torch.original.uncover": "restore_original",
    "torch.original.OVERLAID": "PATCHED",
    "torch.state._Place": "_TensorSlot",
    "torch.devices.choose_device": "set_local_device",
    "torch.sharding.Sharding": "StateSharding",
    # --- jax
    "jax.arguments.Asked": "ExchangeOptions",
    "jax.exchange.Request": "ExchangeKey",
    "jax.exchange.Exchange": "GradientExchange",
    "jax.exchanges.Exchanges": "ExchangeRegistry",
    "jax.exchanges.exchanges": "exchange_registry",
    "jax.taps.Step": "TracedExchange",
    "jax.gradients._Taps": "_DifferentiatedCall",
    "jax.collective.Gather": "AllGather",
    "jax.collective.Scatter": "ReduceScatter",
    "jax.collective.Exchange": "AllToAll",
    "jax.order.settle": "wait_for_programs",
    "jax.order.see_steps_through": "wait_for_steps",
    "jax.order._settled": "_after_programs",
    "jax.native.wait_apart": "wait_on_own_threads",
    "jax.device.Places": "XlaStreams",
    "jax.device.check_place": "check_device",
    "jax.choice.choose_device": "set_local_device",
    "jax.reports.reports": "report",
}

MEMBERS: dict[str, str] = {
    # --- progress
    "runtime.bell.Bell.ring": "set",
    "runtime.turns.Turns.take": "progress",
    "runtime.turns.Turns._take": "_progress",
    "runtime.turns.Turns.doze": "poll",
    "runtime.turns.Turns._doze": "_poll",
    "runtime.turns.Turns.bell": "wakeup",
    "runtime.turns.Turns.place": "status",
    "runtime.thread.CommunicationThread._turns": "_loop",
    "runtime.thread.CommunicationThread._gate": "_driver_lock",
    "runtime.thread.CommunicationThread._turn": "_progress_lock",
    "runtime.thread.CommunicationThread.place": "status",
    "runtime.thread.CommunicationThread.disown": "fail_in_fork",
    "runtime.calls.Reply._bell": "_answered",
    "runtime.talk.Agenda.item": "hold",
    "runtime.inquiry.Inquiry.begin": "ask",
    "runtime.inquiry.Inquiry.hear": "handle_notice",
    "runtime.inquiry.Inquiry._heard": "_answers",
    "runtime.inquiry.Inquiry._place": "_own_status",
    "runtime.runtime.Runtime._place": "_status",
    "runtime.runtime.Runtime._inquiry": "_deadlock_detector",
    "runtime.runtime.Runtime.agenda": "collective_lock",
    "runtime.runtime.Runtime.talk": "channel",
    "runtime.runtime.Runtime.talk_on": "channel_on",
    "runtime.runtime.Runtime.planning": "planning_channel",
    "runtime.runtime.Runtime.plan_apart": "separate_planning",
    "runtime.runtime.Runtime.medium": "make_transport",
    "runtime.lane.PlannedLane._flights": "_in_flight",
    # --- backends
    "comm.backend.Backend.stirs": "may_progress",
    "comm.mpi_channel.Job.stirs": "may_progress",
    "comm.mpi_channel.Family.stirs": "may_progress",
    "runtime.turns.Lane.stirs": "may_progress",
    "runtime.turns.Lane.owes": "owes_work",
    "runtime.turns.Turns.owes": "owes_work",
    "runtime.thread.CommunicationThread.owes": "owes_work",
    "comm.mpi.MpiBackend._situation": "_topology",
    "comm.mpi_routes.Routes._situation": "_topology",
    "comm.host_memory.HostMemory._room": "_free_list",
    "comm.host_memory.HostMemory.next_board": "next_flag_set",
    "comm.host_memory.HostMemory._boards": "_flag_sets",
    "comm.host_reduce.HostReduce._board": "_flags",
    "comm.host_reduce.HostReduces._board": "_flags",
    # --- transport
    "runtime.medium.Medium.stirs": "may_progress",
    "runtime.medium.Medium.settled": "is_enqueued",
    "runtime.medium.Medium.order": "order_after_gradients",
    "runtime.medium.Medium.order_gather": "order_after_shards",
    "runtime.medium.Medium.slot": "view",
    "runtime.medium.Medium.marks": "dependencies",
    "runtime.medium.Medium.due": "take_measured",
    "runtime.steps.Step.marks": "dependencies",
    "runtime.steps.Gather.marks": "dependencies",
    # --- engine
    "runtime.engine.Engine.gathering": "gather_pending",
    "runtime.engine.Engine._gathering": "_tracker",
    "runtime.engine.Engine._gathers": "_allgather",
    "runtime.engine.Engine._whole": "_assembler",
    "runtime.engine.Engine._border": "_step_sync",
    "runtime.whole.WholeGradients._gathers": "_allgather",
    "runtime.border.Border._gathering": "_tracker",
    "runtime.border.Border.talk": "run",
    "runtime.gathering.Gathering._apart": "_alias_check",
    "runtime.gathering.Gathering._passes": "_accumulation",
    "runtime.gathering.Gathering.extra": "unplanned",
    "runtime.gathering.Gathering.whole": "unplanned_gradient",
    "runtime.gathering.Gathering.moments": "timestamps",
    "runtime.gathers.Gathers.go_on": "release_rest",
    "runtime.drift.Drift.lasts": "has_drifted",
    "runtime.tuner.Tuner._drift": "_drift_detector",
    # --- config
    "config.Config.direct_bytes": "zero_copy_min_bytes",
    "config.Config.drift": "replan_threshold",
    "config.Config.probe_s": "probe_budget_s",
    "config.Config.trial_s": "trial_min_s",
    "config.Config.run_dir": "record_dir",
    # --- torch
    "torch.gradients.Gradients._witness": "_guard",
    "torch.witness.Witness._late": "_device_guard",
    "torch.wrapper.Distributed._wfbp_exchange": "_wfbp_sync",
    "torch.wrapper.Distributed._wfbp_asked": "_wfbp_sync_state",
    # --- jax
    "jax.exchanges.Exchanges.reports": "report",
    "jax.exchanges.Exchanges._hear": "_forward_announcements",
    # --- planners
    "core.planners.settled.Settler._settled": "_partitions",
}

MEMBER_WORDS: dict[str, str] = {
    "_medium": "_transport",
    "_talk": "_channel",
    "_direct_bytes": "_zero_copy_min_bytes",
    "_turns": "_loop",
}

WORDS: dict[str, str] = {
    "medium": "transport",
    "talk": "channel",
    "gathering": "tracker",
    "gathers": "allgather",
    "direct_bytes": "zero_copy_min_bytes",
    "turns": "loop",
    "inquiry": "detector",
    "situation": "topology",
    "witness": "guard",
    "travelling": "pending_updates",
    "settler": "partition_optimizer",
    "settled": "partitions",
    "agenda": "collective_lock",
    "arrangement": "buffer_layout",
}
WORD_SCOPES: dict[str, tuple[str, ...]] = {
    "gathers": ("wfbp.runtime",),
    "gathering": ("wfbp.runtime", "tests.unit.test_gather"),
    "talk": ("wfbp.runtime", "wfbp.jax", "tests.unit"),
    "turns": ("wfbp.runtime", "tests.unit.test_thread"),
    "settled": ("wfbp.core.planners", "tests.unit.test_planners"),
    "travelling": ("wfbp.torch", "tests.unit.test_torch"),
    "witness": ("wfbp.torch", "tests.unit.test_torch"),
}
"""Words that mean this only in some modules."""
NOT_WORDS: set[tuple[str, str]] = set()
"""(module, word): left alone there."""

LOCALS: dict[str, str] = {
    "cli.probe._agree.said": "codes",
    "comm.host_files.explain.said": "answers",
    "comm.host_files.open_map.found": "mapped",
    "comm.host_memory.HostMemory.connect.said": "answers",
    "comm.mpi.MpiBackend.all_reduce.found": "parts",
    "comm.mpi._per_block.found": "parts_of_block",
    "comm.probe._together.said": "payloads",
    "config.num_bytes.found": "match",
    "core.cost.Costs.from_json.found": "actual",
    "core.trace.Trace.from_json.found": "actual",
    "core.planners.curve_solver.CurveSolver.cheapest.found": "partition",
    "core.planners.curve_solver.CurveSolver.fewest.found": "partition",
    "core.planners.linear_solver.LinearSolver.fewest.found": "partition",
    "core.planners.optimum.optimum.found": "partition",
    "core.planners.optimum.fewest.found": "partition",
    "core.planners.optimum.fastest_of_as_few.found": "partition",
    "core.planners.hybrid.hybrid.found": "candidates",
    "core.planners.settled.Settler.with_fewer_groups.found": "fewest_so_far",
    "cuda.streams.entered.found": "external",
    "jax.choice.choose_device.found": "devices",
    "jax.device.check_place.found": "actual",
    "jax.exchanges.Exchanges._get.found": "known",
    "jax.exchanges.Exchanges._make.said": "replies",
    "jax.exchanges._disagree.said": "encoded",
    "jax.metrics.average_metrics.found": "indices",
    "jax.trees.Layout.replace.found": "replaced",
    "launcher.mpi._candidates.found": "program",
    "launcher.mpi.find_mpi.found": "implementation",
    "runtime.agreement.check_specs.said": "messages",
    "runtime.agreement._differences.found": "differences",
    "runtime.border.Border.talk.said": "messages",
    "runtime.device_medium.DeviceMedium.backward.found": "buffers",
    "runtime.envelope.unseal.said": "tagged",
    "runtime.gathering.Gathering.reduced.found": "views",
    "runtime.operations.broadcast_buffers.said": "entries",
    "runtime.operations._entries.said": "message",
    "runtime.places.Place.needs.found": "their_lane",
    "runtime.places.Place.decode.said": "encoded",
    "runtime.refusals.check_refusals.said": "payloads",
    "runtime.rows.gather_bytes.said": "shapes",
    "runtime.runtime.Runtime.lease.said": "payloads",
    "runtime.settings.agree_on_settings.said": "settings_by_rank",
    "runtime.shards._Blocks.segments.found": "segments",
    "runtime.talk.Talk.exchange.said": "tagged",
    "runtime.turns.Turns.describe.said": "description",
    "sim.simulate._Worker.iterate.found": "iteration",
    "sim.sweep.sweep.found": "predicted",
    "torch.batch_norm._Normalise.forward.found": "result",
    "torch.batch_norm._Normalise.backward.found": "result",
    "torch.clipping.clip.said": "powers",
    "torch.exchange.Exchange.combined_loss.said": "losses",
    "torch.hyperparameters.check_equal_on_ranks.said": "by_rank",
    "torch.hyperparameters._hyperparameters.found": "numbers",
    "torch.nature._subjects.found": "kinds",
    "torch.sharding.Sharding._gather.said": "payloads",
    "torch.state.broadcast_parameters.found": "named_tensors",
}
PARAMS: dict[str, str] = {}

NO_TEXT = {"Exchange", "Gather", "Step", "Request", "Asked", "Place", "Table", "Flags", "Library",
           "Scatter", "Source", "Slot"}  # fmt: skip
"""Class names that stand for several things, or for a word: not replaced in prose."""

VARIABLES = {
    "WFBP_DIRECT_BYTES": "WFBP_ZERO_COPY_MIN_BYTES",
    "WFBP_DRIFT": "WFBP_REPLAN_THRESHOLD",
    "WFBP_PROBE_S": "WFBP_PROBE_BUDGET_S",
    "WFBP_TRIAL_S": "WFBP_TRIAL_MIN_S",
    "WFBP_RUN_DIR": "WFBP_RECORD_DIR",
}

TEXT: list[tuple[str, str]] = [
    *((rf"\b{old}\b", new) for old, new in VARIABLES.items()),
    *((rf"(?m)^(\s+){old}: ", rf"\g<1>{new}: ") for old, new in WORDS.items()),
    (r"(?m)^(\s+)drift: ", r"\g<1>replan_threshold: "),
    (r"(?m)^(\s+)trial_s: ", r"\g<1>trial_min_s: "),
    (r"(?m)^(\s+)probe_s: ", r"\g<1>probe_budget_s: "),
    (r"(?m)^(\s+)run_dir: ", r"\g<1>record_dir: "),
    (r"``config\.probe_s``", "``config.probe_budget_s``"),
    (r"\b(wfbp\.(?:torch|jax)|wfbp)\.choose_device\b", r"\1.set_local_device"),
    (r"\bchoose_device\b", "set_local_device"),
    (r'"reports\(\)"', '"report()"'),
    (r"\bwfbp\.jax\.reports\(", "wfbp.jax.report("),
]

TOKENS: list[tuple[str, dict[str, str]]] = [
    (
        r"wfbp/config\.py|wfbp/runtime/settings\.py|tests/.*(config|settings|startup|runtime|engine)\w*\.py",
        {
            "direct_bytes": "zero_copy_min_bytes",
            "drift": "replan_threshold",
            "probe_s": "probe_budget_s",
            "trial_s": "trial_min_s",
            "run_dir": "record_dir",
        },
    ),
    (r"wfbp/torch/__init__\.py|wfbp/jax/__init__\.py", {"choose_device": "set_local_device"}),
    (r"wfbp/jax/__init__\.py", {"reports": "report"}),
]
"""String constants that name fields, by file."""

NOT_EVERYWHERE: set[str] = {"order", "take", "place", "item", "begin", "slot", "marks", "extra",
                            "whole", "talk", "hear", "due", "ring", "drift", "run_dir", "_passes",
                            "direct_bytes", "probe_s", "trial_s"}  # fmt: skip
"""Members that are renamed only where the type of the object is known."""

UNTYPED: dict[tuple[str, str], str] = {}
"""(file, member): what it is called there, where no type is known."""

COLLISIONS: dict[tuple[str, str, str], str] = {}
"""(merged module, part, name): the name of that part's symbol in the merged module."""

PACKAGE_DOCS: dict[str, str] = {
    "wfbp.runtime.progress": '''"""How communication moves on: one loop, driven by one thread at a time.

Read ``loop`` first: it polls calls and plan executors, and says how long nothing need be done.
``thread`` decides who drives it, the communication thread or a training thread that waits.
``executor`` sends the groups of a plan in the order that the pure ``core.sequencer`` decides.
``channel`` offers collectives for control data, ``fetching`` gets data from other ranks while
their training threads do something else, ``deadlock`` judges waits that last.
"""
''',
    "wfbp.runtime.transport": '''"""What gradients lie in and travel through: storage of groups, on the host or on a device.

Read ``transport`` first: the interface that the executor and the tracker use, and the host's.
``buffers`` are the host's fusion, scatter and gather buffers; ``flags`` is what every message says
beside its tensors. ``device_transport`` and ``device_buffers`` are the same on an accelerator.
"""
''',
    "wfbp.runtime.tuning": '''"""Which plan runs when.

Read ``tuner`` first: profile, plan, try, keep what is fastest, notice when it no longer is.
``candidates`` are the plans worth a trial, ``trial`` compares them, ``profile`` turns time stamps
into a trace, ``network`` measures the cost curves. Nothing here knows of threads.
"""
''',
    "wfbp.runtime.engine": '''"""One optimizer's gradients, from ready events to averaged values.

Read ``engine`` first: what adapters call. ``tracker`` notes which gradients exist and posts events;
``allgather`` is what the training thread knows of all-gathers; ``step_sync`` is the exchange at a
step's end that happens only where a rank asks for it. ``recorder`` writes what was done,
``allocator`` keeps freed memory with the process.
"""
''',
    "wfbp.runtime.api": '''"""What programs call: collectives on arrays and gradient reduction for arrays.

``array_collectives`` are synchronous and compare their arguments between ranks first; ``reducer``
is for any training loop that knows when a gradient exists.
"""
''',
    "wfbp.comm.mpi": '''"""The backend on MPI, and on the shared memory of ranks on one host.

Read ``backend`` first, then ``routing``, which decides how a collective goes and cuts it into jobs.
``jobs`` starts them in order, a window at a time; ``transfers`` are their messages under way.
``shm_memory`` and ``shm_allreduce`` replace messages where all ranks share a host. ``library`` loads
MPI, ``launch`` compares with what the launcher promised, ``start_notice`` is a program of its own that tells why a rank does not get beyond its start.
"""
''',
    "wfbp.comm.device": '''"""Backends whose buffers lie on an accelerator.

Read ``device`` first, the interface to one accelerator, then ``backend``, what NCCL and staging have
in common. ``nccl`` and ``staged`` (through pinned memory of the host) are the two; ``connection``
chooses between them, the same on every rank.
"""
''',
}

MODULE_DOCS: dict[str, str] = {
    "wfbp.runtime.step": """What is known of one step: its gradients, its events and its time stamps.

The training thread tells the executor of a step by a :class:`Step`, by indices of tensors that are
ready, by ``CLOSE`` or ``DISCARD``, and by :class:`GatherRequest`. A :class:`BufferView` says where a
tensor lies after reduction. :class:`StepTimestamps` are moments of a step before they are seconds.""",
    "wfbp.runtime.consistency": """Whether ranks are about to do the same: compared before data moves.

Tensors and settings are compared once, when an engine is made, so that no step needs to negotiate.
Synchronous collectives compare name, element type, shape and operation each time. An argument that
one rank cannot take is told to the others, which would wait for that rank otherwise.""",
    "wfbp.runtime.process": """The runtime of this process: made by ``init``, used everywhere, ended by ``shutdown``.

``init`` compares the settings that must be the same on every rank, and installs hooks for uncaught
exceptions: a rank that fails tells the others why before the job ends.""",
    "wfbp.runtime.progress.loop": """The progress loop: the state of communication, moved on by one thread at a time.

Two kinds of work live here: *calls*, one collective each, for which a training thread waits; and
*lanes*, which send the groups of a plan while training goes on.""",
    "wfbp.runtime.progress.deadlock": """Waits that last: where the other ranks are, and whether ranks wait for each other.

A collective ends when every rank has begun it. Calls follow one another on one backend, so their
count tells which ranks have come to one; a lane's collectives follow its plan, and are counted,
too. A rank *needs* another where it waits for a collective that the other has not begun and, being
in a wait itself, will not begin before that is over. Ranks that need one another in a circle never
go on; a rank that is only slow is in no circle, because it does not wait.

A rank that has waited for long asks all others, reports their answers, and where these show a
circle, asks once more. Every first answer was given before the second question, every second one
after it: where none has changed, all were true at once. Then nothing can move any of these ranks
any more, and the asker tells all. :class:`StallWatch` judges every other wait by its length.""",
    "wfbp.runtime.progress.channel": """Control channels: collectives of bytes that a training thread waits for.

Each payload carries a tag that says what for. Exchanges meet in the order in which ranks come to
them; ranks that have come to different ones find out by the tag, before anybody reads a payload that
was meant for another purpose.""",
    "wfbp.runtime.transport.buffers": """Fusion buffers on the host: where the tensors of each group lie while they travel.

A message's start-up is shared by copying small tensors into one buffer. For a large tensor the
copy costs more than a message of its own, so the backend is told where it lies instead. Large
tensors come first in a buffer, so that the small ones and the flags behind them stay one piece.
Decoupled groups travel as shards: each rank gets one part of every tensor, and all ranks' parts lie
one behind the other in the buffer.""",
    "wfbp.runtime.transport.flags": """What ranks say of a step beside its gradients: presence, requests, the step's number.

In the host's memory the flags travel behind the tensors of each message. On a device reading them
would make the host wait for it in every step; so they travel on their own, through the host, in one
small all-reduce that is started when the step's last group leaves.""",
    "wfbp.runtime.tuning.tuner": """Which plan runs when: measure, plan, try, keep what is fastest, and notice when it no longer is.""",
    "wfbp.runtime.engine.tracker": """Tracks the gradients of the open step, on the training thread, as they appear.

Counts how often each appears (accumulation is learned), checks that none lies where another one is
averaged, and posts the events that let groups leave.""",
    "wfbp.runtime.engine.allgather": """All-gathers as the training thread sees them: who has to wait for what.""",
    "wfbp.runtime.engine.step_sync": """The exchange at a step's end, which happens only where some rank asks for it.

A tensor that had no gradient before (frozen until now, or seldom used), or whose gradient grew
after it was sent, is reduced here, in a message of its own; and the tuner decides about plans.""",
    "wfbp.runtime.engine.recorder": """What an engine tells of itself: its report, and the recording of its last iterations.""",
    "wfbp.torch.optimizer": """DistributedOptimizer: any PyTorch optimizer, with its gradients averaged over the ranks.""",
    "wfbp.torch.gradient_sync": """What one distributed optimizer does together with other ranks.

:class:`GradientHooks` ties parameters to an engine: hooks announce gradients, and results become
``p.grad``. :class:`OptimizerSync` closes steps, has the optimizer updated, and sees that parameters
are read up to date. The numbers by which ranks update are compared before the first update.""",
    "wfbp.torch.grad_guard": """Notices gradients that were changed between their hooks and their reduction.

On the host a few bytes are compared at once. On a device samples are compared there, and the host
hears of it without waiting.""",
    "wfbp.torch.optimizer_probe": """How an optimizer couples the elements of its tensors, found by experiment.

Copies of the optimizer step small stand-ins for its tensors, whole and cut; results are compared.
The experiment leaves no traces in the optimizer, in PyTorch's modes or its random numbers.""",
    "wfbp.torch.updates": """What follows when gradients have been reduced: the optimizer's update.

Either every rank updates every parameter, what is decoupled when it is about to be read; or each
rank updates its shards, and the parameters are gathered while the next forward runs.""",
    "wfbp.torch.tensors": """Between tensors and the bytes that travel, and where tensors lie: the host or one device.""",
    "wfbp.comm.buffers": """Buffers as the backends see them: typed views of memory, and how contributions combine.

:func:`combine` is the one definition of reduction that every backend shares.""",
    "wfbp.comm.mpi.backend": """The backend on MPI, and short notices from one rank to all others.""",
    "wfbp.comm.mpi.jobs": """Jobs of one communicator: the order in which they start, how far ahead, and their kinds.

A job is a chunk of a large message, or all of a small one: a collective of the library, or a direct
exchange of shards among all ranks (reduce-scatter, all-gather, or both).""",
    "wfbp.comm.mpi.shm_memory": """Memory that the ranks of one host can read of each other: one file without a name per rank.""",
    "wfbp.comm.mpi.shm_allreduce": """All-reduce among ranks that can read each other's memory (``shm_memory``).

Ranks tell each other by flags in that memory how far they have come with each chunk.""",
    "wfbp.comm.device.staged": """Collectives of a device's buffers through pinned memory of the host, where NCCL cannot serve.

Messages are cut into pieces: one is copied to the host while another travels.""",
    "wfbp.cuda.kernels": """The CUDA kernels of ``csrc/pack.cu``: their source, their arguments, and CuPy's way to run them.""",
    "wfbp.core.cost": """What a message costs: seconds of the channel by its bytes, one curve per collective.

Beside the curves stands ``kappa``, by how much communication slows down the computation.""",
    "wfbp.core.timeline": """One steady iteration under a plan, predicted exactly from a trace and costs.

Backward and forward are phases: groups leave in order, each when it is ready and the channel free.""",
    "wfbp.core.planners.baselines": """Planners that every other one is compared with: published rules and plain extremes.

WFBP (every tensor alone), a single message, groups closed by size, MG-WFBP's merging rule,
parameter servers, and iPart's greedy partitions.""",
    "wfbp.core.planners.dear": """DeAR: groups closed by size, scattered in backward and gathered in the next forward.

Its threshold is found by Bayesian optimisation: ask for the next one to try, tell what it took.""",
    "wfbp.core.planners.hybrid": """Hybrid: each gradient all-reduced in backward, or scattered there and gathered in forward.

Two searches propose modes: *shared* groups, each all-reduced or decoupled as it is, and a *split*,
which all-reduces what backward has room for and decouples the rest.""",
    "wfbp.core.planners.exact": """Exact planners: the optimum of start-up sharing against overlap.

OASR all-reduces everything in backward; ``independent`` decouples everything and cuts both phases
exactly.""",
    "wfbp.core.planners.partition": """Partitions: into which runs is a row of gradients cut, in backward and in forward?

The solvers answer for one :class:`Row`; :class:`Rows` are those of a trace. Interference is taken
out by the compute clock (see ``wfbp.core.timeline``): ready times are then fixed.""",
    "wfbp.jax.gradients": """value_and_grad and grad, averaged over the ranks while backward computes.""",
    "wfbp.jax.gradient_hooks": """Where gradients leave a program, compiled or not, and where they come back.

Announcements and waits are JAX primitives; a leaf's hook announces its gradient in backward.""",
    "wfbp.jax.gradient_sync": """All exchanges of gradients of this process, and how ranks come to make the same ones.

An :class:`ExchangeKey` says what is exchanged; equal ones share a :class:`GradientExchange`, which
gives a step's announcements to its engine. The registry passes on what XLA's threads announce.""",
    "wfbp.jax.collectives": """Collectives on JAX arrays, under Horovod's names, inside ``jit`` and outside, differentiable.

They are one JAX primitive, which knows how they are differentiated, batched and compiled.""",
    "wfbp.jax.device": """The device that JAX's programs run on, streams as XLA tells them, and the choice of a GPU.""",
    "wfbp.sim.simulate": """Replays a plan on a trace with a virtual clock, by the sequencer that the runtime uses.""",
}

PATCHES_FIRST: list[tuple[str, str, str]] = []
PATCHES_SECOND: list[tuple[str, str, str]] = []

MESSAGES = (
    "Move modules into subpackages and give things the field's names",
    "Merge modules that are parts of one idea",
    "Keep the old public names as deprecated aliases, and delete what has no user",
)


def symbols(tree: Any, report: Any) -> dict[tuple[str, str], str]:
    """``runtime.bell.Bell`` -> new name, as (module, name)."""
    result = {}
    for old, new in SYMBOLS.items():
        full = old if old.startswith("tests.") else f"wfbp.{old}"
        module, _, name = full.rpartition(".")
        source = tree.modules.get(module)
        if source is None or name not in source.top.bound:
            report.error(f"names: no {full}")
            continue
        if new in source.top.bound and f"{old.rpartition('.')[0]}.{new}" not in SYMBOLS:
            report.error(f"names: {full} -> {new}, which exists there")
            continue
        result[module, name] = new
    return result


def members(report: Any) -> dict[tuple[str, str], str]:
    result = {}
    for old, new in MEMBERS.items():
        owner, _, name = f"wfbp.{old}".rpartition(".")
        result[owner, name] = new
    return result


def qualified(table: dict[str, str], tree: Any, report: Any, what: str) -> dict[Any, str]:
    result = {}
    for old, new in table.items():
        qualname, _, name = f"wfbp.{old}".rpartition(".")
        result[qualname, name] = new
    return result
