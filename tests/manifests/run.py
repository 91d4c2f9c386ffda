#!/usr/bin/env python3
"""Every manifest in deploy/ and docs/kubernetes.md against the schemas of Kubernetes, strictly.

    PYTHONPATH=<kubernetes-validate> tests/manifests/run.py

JobSet, Kubeflow Trainer and the Prometheus operator publish no schemas there: of theirs, only jobs within are checked.
"""
import copy
import pathlib
import re
import sys
import textwrap

import yaml
from kubernetes_validate import SchemaNotFoundError, ValidationError, validate

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The oldest one that these manifests are for, and the latest one that has schemas.
VERSIONS = ("1.31", "1.37")
# Kinds without a schema, and where jobs are within them.
OTHERS = {
    "JobSet": lambda manifest: manifest["spec"]["replicatedJobs"],
    "ClusterTrainingRuntime": lambda manifest: manifest["spec"]["template"]["spec"]["replicatedJobs"],
    "ServiceMonitor": lambda manifest: [],
    "TrainJob": lambda manifest: [],
}


def manifests():
    """Names and texts."""
    for path in sorted((ROOT / "deploy").rglob("*.yaml")):
        yield str(path.relative_to(ROOT)), path.read_text()
    text = (ROOT / "docs/kubernetes.md").read_text()
    for block in re.finditer(r"^( *)```yaml\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
        line = text[:block.start()].count("\n") + 1
        yield f"docs/kubernetes.md:{line}", textwrap.dedent(block[2])


def checked(resource, version):
    """Validates a resource, or the jobs within; returns in words what was checked."""
    kind = resource["kind"]
    if kind not in OTHERS:
        used = validate(resource, version, strict=True)
        assert used == version, f"the schema of {used} stood in for that of {version}"
        return kind
    try:
        validate(resource, version, strict=True)
    except SchemaNotFoundError:
        jobs = OTHERS[kind](resource)
        for job in jobs:
            template = job["template"]
            # What controllers fill in where it is left out.
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **template}
            validate(whole, version, strict=True)
        return f"{len(jobs)} job in {kind}" if jobs else f"{kind} not checked"
    raise AssertionError(f"{kind} has a schema now: remove it from OTHERS")


def must_be_refused(resource, version):
    """A field that is not there, and a value of another type: the check of a manifest can fail."""
    if resource["kind"] not in OTHERS:
        unknown = {**resource, "spec": {**resource["spec"], "unknownField": 1}}
        expect_refusal(unknown, version)
    text = yaml.safe_dump(resource)
    grace = "terminationGracePeriodSeconds: "
    for right, wrong in (("restartPolicy:", "restartPolice:"), (grace, grace + "s")):
        if right in text:
            expect_refusal(yaml.safe_load(text.replace(right, wrong)), version)


def expect_refusal(resource, version):
    try:
        checked(resource, version)
    except ValidationError:
        return
    raise AssertionError(f"a wrong {resource['kind']} was accepted: {resource}")


def main():
    failed = count = 0
    for name, text in manifests():
        resources = [resource for resource in yaml.safe_load_all(text) if resource and "apiVersion" in resource]
        for resource in resources:
            for version in VERSIONS:
                try:
                    what = checked(copy.deepcopy(resource), version)
                    must_be_refused(resource, version)
                    print(f"{name}: {what} `{resource['metadata']['name']}` ({version})")
                    count += 1
                except ValidationError as error:
                    print(f"error: {name} ({version}): {'.'.join(map(str, error.path))}: {error.message}")
                    failed += 1
    assert count + failed >= 2 * 12, f"only {count} manifests were found"
    print(f"{count} checks passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
