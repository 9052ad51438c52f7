"""Figures for Prometheus: runs by state, bytes promised and there, what files take, and how long the oldest run waits."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from memfit.service.service import Service
from memfit.service.states import LIVE, OVER, WAITING
from memfit.service.stored_studies import STUDY_LIVE, STUDY_OVER, StudyStore


class _Figures:
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        """As the library asks for it."""
        store, view = self._service.store, self._service.dispatcher.view
        numbers = store.numbers_by_state()
        runs = GaugeMetricFamily("memfit_runs", "Runs by their state.", labels=["state"])
        for state in (*LIVE, *OVER):
            runs.add_metric([state], numbers.get(state, 0))
        yield runs
        capacity = GaugeMetricFamily("memfit_capacity_bytes", "Bytes that runs share.", labels=["device"])
        used = GaugeMetricFamily("memfit_promised_bytes", "Bytes promised to runs that run.", labels=["device"])
        for name, size in self._service.settings.capacity.items():
            capacity.add_metric([name], size)
            used.add_metric([name], view.used.get(name, 0))
        yield capacity
        yield used
        studies = GaugeMetricFamily("memfit_studies", "Studies by their state.", labels=["state"])
        many = StudyStore(store).numbers_by_state()
        for state in (*STUDY_LIVE, *STUDY_OVER):
            studies.add_metric([state], many.get(state, 0))
        yield studies
        files = GaugeMetricFamily("memfit_run_files_bytes", "What the files of an owner's runs take.", labels=["owner"])
        for owner, size in store.disk_by_owner().items():
            files.add_metric([owner], size)
        yield files
        disk = shutil.disk_usage(self._service.settings.folder)
        yield GaugeMetricFamily("memfit_disk_free_bytes", "Free where the service keeps its runs.", value=disk.free)
        yield GaugeMetricFamily(
            "memfit_draining", "Whether it starts nothing new.", value=int(self._service.dispatcher.draining)
        )
        yield CounterMetricFamily("memfit_events", "Things that have happened to runs.", value=store.last_event())
        waiting = [run.submitted for run in store.live() if run.state == WAITING]
        oldest = time.time() - min(waiting) if waiting else 0.0
        yield GaugeMetricFamily(
            "memfit_longest_wait_seconds", "How long the oldest waiting run has waited.", value=oldest
        )
        yield GaugeMetricFamily(
            "memfit_looked_seconds", "When the dispatcher last looked, since 1970.", value=view.made
        )


def exposition(service: Service) -> bytes:
    """All figures, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(service))
    return generate_latest(registry)
