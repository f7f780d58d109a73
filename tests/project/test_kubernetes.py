"""The manifests in examples/kubernetes have the fields of their APIs, agree within themselves, and their commands run.

The pods are two hosts, on which the names of Kubernetes' DNS stand in /etc/hosts.
"""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from harness.hosts import ADDRESSES, two_hosts, why_no_hosts
from harness.nodes import SECRET

yaml = pytest.importorskip("yaml")
models = pytest.importorskip("kubeflow_trainer_api.models")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = {path.stem: list(yaml.safe_load_all(path.read_text())) for path in FOLDER.glob("*.yaml")}
KINDS = {
    "Service": models.IoK8sApiCoreV1Service,
    "Job": models.IoK8sApiBatchV1Job,
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_has_the_fields_of_its_api(name):
    for document in MANIFESTS[name]:
        assert unknown_fields(document) == []


def test_a_misspelled_field_is_noticed():
    service, job = copy.deepcopy(MANIFESTS["job"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    service["spec"]["clusterIp"] = container["images"] = "None"
    assert unknown_fields(service) == ["spec.clusterIp"]
    assert unknown_fields(job) == ["spec.template.spec.containers.0.images"]


def unknown_fields(document):
    """Return the fields that the schema of its kind has not; raise an error for a value of another type."""
    known = KINDS[document["kind"]].from_dict(document).to_dict()
    return [".".join(path) for path in paths(document) if path not in {*paths(known)}]


def paths(value):
    """Return the names that lead to each leaf."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(str(name), *path) for name, each in inside for path in paths(each)] or [()]


def job_of(name):
    """Return the spec of the Job in a manifest, the names of its pods and of their domain, and the container."""
    if name == "job":
        service, job = MANIFESTS[name]
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
        pods, spec = job["metadata"]["name"], job["spec"]
        domain = spec["template"]["spec"]["subdomain"]
        assert domain == service["metadata"]["name"]
    else:
        (jobs,) = MANIFESTS[name]
        (replicated,) = jobs["spec"]["replicatedJobs"]
        assert jobs["spec"]["network"]["enableDNSHostnames"]
        domain = jobs["metadata"]["name"]
        pods, spec = f"{domain}-{replicated['name']}-0", replicated["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    return spec, pods, domain, container


@pytest.mark.parametrize("name", ["job", "jobset"])
def test_pods_ports_and_the_secret_agree(name):
    spec, pods, domain, container = job_of(name)
    options = dict(word.removeprefix("--").split("=") for word in container["command"] if word.startswith("--"))
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    assert options == {
        "nnodes": str(spec["completions"]),
        "node-rank": "$(JOB_COMPLETION_INDEX)",
        "master-addr": f"{pods}-0.{domain}.$(NAMESPACE).svc.cluster.local",
        "master-port": str(container["ports"][0]["containerPort"]),
    }
    (secret,) = [
        each["valueFrom"]["secretKeyRef"] for each in container["env"] if each["name"] == "RINGCOMM_JOB_SECRET"
    ]
    created = re.search(r"create secret generic (\S+) --from-literal=(\S+)=", (FOLDER / f"{name}.yaml").read_text())
    assert (secret["name"], secret["key"]) == created.groups()


def pods_of(name):
    """Return the command of the container in a manifest, the names of its pods, and the environment of each."""
    if name == "trainjob":
        (job,) = MANIFESTS[name]
        trainer, job = job["spec"]["trainer"], job["metadata"]["name"]
        names = [f"{job}-node-0-{pod}.{job}" for pod in range(trainer["numNodes"])]
        sizes = {"PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": trainer["numProcPerNode"]}
        store = {"PET_MASTER_ADDR": names[0], "PET_MASTER_PORT": 29500}  # as Kubeflow's plugin for torch sets them
        return trainer["command"], names, [{**sizes, **store, "PET_NODE_RANK": pod} for pod in range(len(names))]
    spec, pods, domain, container = job_of(name)
    names = [f"{pods}-{pod}.{domain}.default.svc.cluster.local" for pod in range(spec["completions"])]
    common = {"NAMESPACE": "default", "RINGCOMM_JOB_SECRET": SECRET}
    return container["command"], names, [{**common, "JOB_COMPLETION_INDEX": pod} for pod in range(len(names))]


@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_command_runs_on_two_pods_with_little_shared_memory(name, tmp_path):
    if reason := why_no_hosts():
        pytest.skip(reason)
    if name == "trainjob":
        pytest.importorskip("torch")
    command, names, environments = pods_of(name)
    program = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "sum.py").write_text(program)
    module = {"ringcomm": "ringcomm", "torchrun": "torch.distributed.run"}[command[0]]
    records = "\n".join(map(" ".join, zip(ADDRESSES, names, strict=False)))
    with two_hosts() as hosts:
        pods = []
        for host, environment in zip(hosts, environments, strict=True):
            host.run("cat > /dev/shm/hosts; mount --bind /dev/shm/hosts /etc/hosts", text=records)
            host.run("mount -o remount,size=64k /dev/shm")  # a thousandth of what a pod has
            words = [
                re.sub(r"\$\((\w+)\)", lambda found, known=environment: str(known[found[1]]), word) for word in command
            ]
            pods.append(
                subprocess.Popen(
                    [*host.enter, "sh", "-c", 'cd "$0"; exec "$@"', tmp_path, sys.executable, "-m", module, *words[1:]],
                    env={**os.environ, **{variable: str(value) for variable, value in environment.items()}},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        ended = [pod.communicate(timeout=2 * harness.JOB) for pod in pods]
        assert [pod.returncode for pod in pods] == [0, 0], ended
    printed = "".join(out for out, _ in ended)
    assert sorted(re.findall(r"rank \d of \d: 10 \(4, 3\)", printed)) == [f"rank {r} of 4: 10 (4, 3)" for r in range(4)]
