#!/usr/bin/env python3
"""Export to a collector of OpenTelemetry: what another implementation of OTLP understands of it.

    PYTHONPATH=<grpcio, opentelemetry-proto> tests/otlp/run.py --programs target/debug

The programs are built with the feature `otlp`. A launcher's own daemon exports while a rank fails once, and at the end.
"""
import argparse
import concurrent.futures
import os
import pathlib
import queue
import socket
import subprocess
import sys
import tempfile
import time

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

WORKER = """
import os, sys
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" else 0)
"""


class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, received):
        self.received = received

    def Export(self, request, context):
        self.received.put((dict(context.invocation_metadata()), request))
        return metrics_service_pb2.ExportMetricsServiceResponse()


class Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, received):
        self.received = received

    def Export(self, request, context):
        self.received.put(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def drained(received):
    while not received.empty():
        yield received.get()


def attributes(pairs):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def sample(request, name, **labels):
    for metric in request.resource_metrics[0].scope_metrics[0].metrics:
        if metric.name == name:
            data = getattr(metric, metric.WhichOneof("data"))
            for point in data.data_points:
                if attributes(point.attributes) == labels:
                    return point
    raise AssertionError(f"{name}{labels} is missing in {request}")


def check(programs, folder):
    metrics, traces = queue.Queue(), queue.Queue()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(metrics), server)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(traces), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    command = [programs / "ddp-run", "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", "night",
               "--log-dir", folder / "logs", worker]
    ambient = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment = {**ambient, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
                   "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=team%20a"}
    finished = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    server.stop(None).wait(timeout=30)

    last = list(drained(metrics))[-1]
    headers, request = last
    assert headers["x-tenant"] == "team a", headers
    resource = attributes(request.resource_metrics[0].resource.attributes)
    assert resource["service.name"] == "ddp-rendezvous" and len(resource["service.instance.id"]) == 32, resource
    restarts = sample(request, "ddp_restarts_total", reason="worker_failed")
    assert restarts.as_double == 1 and restarts.start_time_unix_nano < restarts.time_unix_nano, restarts
    assert sample(request, "ddp_jobs_ended_total", result="success").as_double == 1
    rounds = sample(request, "ddp_rendezvous_round_seconds")
    assert rounds.count == 2 and len(rounds.bucket_counts) == len(rounds.explicit_bounds) + 1, rounds

    spans = [span for request in drained(traces) for span in request.resource_spans[0].scope_spans[0].spans]
    assert [span.name for span in spans] == ["generation 1", "generation 2"], spans
    assert len({span.trace_id for span in spans}) == 1 and len(spans[0].trace_id) == 16, spans
    assert spans[0].start_time_unix_nano < spans[0].end_time_unix_nano <= spans[1].start_time_unix_nano, spans
    first, second = (attributes(span.attributes) for span in spans)
    assert first["ddp.job_id"] == "night" and first["ddp.ranks"] == 2, first
    assert "rank 1" in first["ddp.ended"] and "code 3" in first["ddp.ended"], first
    print("spans:", *(f"{span.name}: {attributes(span.attributes)}" for span in spans), sep="\n  ")

    def runs(**more):
        began = time.monotonic()
        run = subprocess.run(list(map(str, command)), env={**environment, **more}, capture_output=True, text=True,
                             timeout=120)
        assert run.returncode == 0, run.stderr
        return [line for line in run.stderr.splitlines() if "OTEL_" in line], time.monotonic() - began

    # A collector that is away costs one warning for each signal. One that never answers costs two seconds.
    said, usual = runs()
    assert len(said) == 2 and all("refused" in line for line in said), said
    print("a collector that is away:", *said, sep="\n  ")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said, took = runs(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert not said and took - usual < 4, (said, took, usual)
    print(f"one that never answers: {took:.1f} s instead of {usual:.1f}")
    # What is meant for the workers' own telemetry does not stop a job.
    said, _ = runs(OTEL_EXPORTER_OTLP_ENDPOINT="https://127.0.0.1:4317")
    assert len(said) == 1 and "neither metrics nor spans are sent" in said[0], said
    print("one with TLS:", said[0], sep="\n  ")
    said, _ = runs(OTEL_SDK_DISABLED="true")
    assert not said, said


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--programs", type=pathlib.Path, required=True, help="folder of the programs")
    programs = arguments.parse_args().programs.resolve()
    with tempfile.TemporaryDirectory() as folder:
        check(programs, pathlib.Path(folder))
    print("ok")


if __name__ == "__main__":
    sys.exit(main())
