"""Prometheus' own series, the node exporter's and the GPU exporter's, as far as anything here uses them."""

from __future__ import annotations

from kvstrata.observe.catalog import Kind, Needs, table

__all__ = ["METRICS"]

_C, _G = Kind.COUNTER, Kind.GAUGE

_PROMETHEUS = (
    ("up", _G, "0/1", "1 while the target of that job answers Prometheus."),
    ("ALERTS", _G, "1", "One series an alert that is pending or firing."),
)  # fmt: skip

_PROCESS = (
    ("process_resident_memory_bytes", _G, "bytes",
     "Memory of a process, by job. Of vLLM, the API server's: its engine has no page."),
    ("process_cpu_seconds_total", _C, "seconds", "CPU time of a process, by job. Of vLLM, the API server's."),
    ("process_start_time_seconds", _G, "unix time", "When a process started, by job."),
)  # fmt: skip

_NODE = (
    ("node_filesystem_avail_bytes", _G, "bytes", "Bytes free on a disk; mountpoint `/cache` is the cache's."),
    ("node_filesystem_size_bytes", _G, "bytes", "Size of a disk."),
    ("node_memory_MemAvailable_bytes", _G, "bytes", "Memory that programs can still have."),
    ("node_memory_MemTotal_bytes", _G, "bytes", "Memory of the machine."),
    ("node_cpu_seconds_total", _C, "seconds", "CPU time by mode."),
)  # fmt: skip

_GPU = (
    ("DCGM_FI_DEV_GPU_UTIL", _G, "%", "How busy a GPU is."),
    ("DCGM_FI_DEV_FB_USED", _G, "MiB", "GPU memory in use."),
    ("DCGM_FI_DEV_FB_FREE", _G, "MiB", "GPU memory free."),
)  # fmt: skip

_LABELS = {
    "up": ("job",),
    "ALERTS": ("alertname", "alertstate"),
    "node_filesystem_avail_bytes": ("mountpoint",),
    "node_filesystem_size_bytes": ("mountpoint",),
    "node_cpu_seconds_total": ("mode",),
    "DCGM_FI_DEV_GPU_UTIL": ("gpu",),
    "DCGM_FI_DEV_FB_USED": ("gpu",),
    "DCGM_FI_DEV_FB_FREE": ("gpu",),
}

METRICS = (
    *table("Prometheus", _PROMETHEUS, labels=_LABELS, lazy=frozenset({"ALERTS"}), needs={"ALERTS": Needs.EVENT}),
    *table("process", _PROCESS),
    *table("node exporter", _NODE, labels=_LABELS),
    *table("DCGM exporter", _GPU, labels=_LABELS, all_need=Needs.GPU),
)
