"""Limits of silence: after how long something that reports at intervals counts as gone."""

# An actor reports to the registry once a second, so the driver's decisions on money and time are about a second old.
REPORT_S = 1.0

# An elastic pool has released an actor without open units after five missing reports: a busy machine delays one or two.
RELEASED_S = 5.0

# An actor is shown as silent after 15 missing reports: a machine that only swaps or pauses recovers sooner.
ACTOR_SILENT_S = 15.0

# A run writes its last status right after its last record; the limit covers retries of a slow store.
LAST_STATUS_S = 20.0

# A running job writes its status every second, or every 10 s to a store; the limit covers some failed writes.
STATUS_SILENT_S = 120.0

# Factors of `run.stall_timeout`, the limit of one step: loading takes many minutes, and while a run makes no progress,
# an engine may be restarted several times.
LOAD_TIMEOUTS = 12
PROGRESS_TIMEOUTS = 6
