#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The manifests of packaging/kubernetes, as far as they can be checked without a cluster.

All fields are known ones. Names, volumes, images, ports, files of the Secret and options agree with each other, with the
Dockerfile, with docs/containers.md and with the programs.

Usage: kubernetes_check.py FOLDER PRODUCT                   FOLDER: packaging; PRODUCT: folder of the programs
       kubernetes_check.py FOLDER PRODUCT --show FILE WHAT  prints, of the container in FILE: args, script, probe, capabilities
"""

import os
import re
import subprocess
import sys

import yaml

# The fields that the manifests use, of those that the API has. None: a value. [X]: a list of X. {"*": X}: any name.
METADATA = {"name": None, "namespace": None, "labels": {"*": None}, "annotations": {"*": None}}
PROFILE = {"type": None}
CONTAINER = {
    "name": None,
    "image": None,
    "command": [None],
    "args": [None],
    "env": [{"name": None, "value": None}],
    "ports": [{"name": None, "containerPort": None}],
    "readinessProbe": {"exec": {"command": [None]}, "timeoutSeconds": None},
    "securityContext": {
        "privileged": None,
        "capabilities": {"add": [None], "drop": [None]},
        "seccompProfile": PROFILE,
        "appArmorProfile": PROFILE,
    },
    "volumeMounts": [{"name": None, "mountPath": None, "readOnly": None, "subPath": None}],
}
VOLUME = {
    "name": None,
    "hostPath": {"path": None, "type": None},
    "secret": {"secretName": None, "defaultMode": None},
    "persistentVolumeClaim": {"claimName": None},
}
POD = {
    "restartPolicy": None,
    "runtimeClassName": None,
    "hostNetwork": None,
    "dnsPolicy": None,
    "nodeSelector": {"*": None},
    "tolerations": [{"key": None, "operator": None, "effect": None}],
    "terminationGracePeriodSeconds": None,
    "automountServiceAccountToken": None,
    "containers": [CONTAINER],
    "volumes": [VOLUME],
}
TEMPLATE = {"metadata": METADATA, "spec": POD}
KINDS = {
    ("v1", "Namespace"): None,
    ("v1", "PersistentVolumeClaim"): {"accessModes": [None], "resources": {"requests": {"storage": None}}},
    ("apps/v1", "DaemonSet"): {"selector": {"matchLabels": {"*": None}}, "updateStrategy": PROFILE, "template": TEMPLATE},
    ("batch/v1", "Job"): {"backoffLimit": None, "template": TEMPLATE},
}


def fail(text):
    sys.exit(f"kubernetes_check: {text}")


def check_fields(value, known, where):
    """That `value` has no other fields than `known`."""
    if known is None:
        if isinstance(value, (dict, list)):
            fail(f"{where} is no single value")
    elif isinstance(known, list):
        if not isinstance(value, list) or not value:
            fail(f"{where} is no list")
        for number, one in enumerate(value):
            check_fields(one, known[0], f"{where}[{number}]")
    else:
        if not isinstance(value, dict):
            fail(f"{where} has no fields")
        for name, one in value.items():
            if name not in known and "*" not in known:
                fail(f"{where} has a field {name}, which is unknown")
            check_fields(one, known.get(name, known.get("*")), f"{where}.{name}")


def documents(path):
    with open(path) as f:
        return list(yaml.safe_load_all(f))


def check_options(product, words, where):
    """Each option of a command line of ours is one that the program has."""
    helped = subprocess.run([os.path.join(product, words[0]), "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout
    for word in words[1:]:
        if word == "--":
            break
        option = word.split("=")[0]
        if option.startswith("--") and not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", helped):
            fail(f"{where}: {words[0]} has no option {option}")


def check_script(product, script, where):
    """The same for the commands in a script."""
    joined = script.replace("\\\n", " ")
    commands = re.findall(r"\bcr-[a-z]+ [^|&;\n]*", joined)
    if not commands:
        fail(f"{where}: the script starts nothing of ours")
    for command in commands:
        check_options(product, command.split(), where)
    subprocess.run(["bash", "-n", "-c", script], check=True)


def check_files(words, container, volumes, secrets, where):
    """Files that the program is given are in something that is mounted; those of a Secret are ones that it is made with."""
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    for path in re.findall(r"(?<![\w$./-])(/(?:etc|run|var|jobs|images|output|opt)/[\w./-]+)", " ".join(words)):
        over = [place for place in mounts if path == place or path.startswith(place + "/")]
        if not over and path != "/run/cuda-remote/hostd.sock":
            fail(f"{where}: nothing is mounted at {path}")
        for place in over:
            secret = mounts[place].get("secret", {}).get("secretName")
            if secret and path != place and path[len(place) + 1 :] not in secrets.get(secret, ()):
                fail(f"{where}: the Secret {secret} is made without {path[len(place) + 1 :]}")


def check_pod(pod, where, product, targets, secrets):
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    used = set()
    for container in pod["containers"]:
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        if len(set(paths)) != len(paths):
            fail(f"{where}: two volumes at one path")
        used |= {mount["name"] for mount in container["volumeMounts"]}
        image, version = container["image"].split(":")
        target = image.replace("cuda-remote-", "")
        if image.startswith("cuda-remote-"):
            if target not in targets:
                fail(f"{where}: the Dockerfile has no target for {image}")
            ours = subprocess.run([os.path.join(product, "cr-run"), "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
            if version not in ours.split():
                fail(f"{where}: the image's version is {version}, and the programs' is {ours}")
        if container.get("command") == ["/bin/bash", "-c"]:
            (script,) = container["args"]
            check_script(product, script, where)
            words = [re.sub(r"\$hosts\b", "/etc/cuda-remote/hosts", script)]
        else:
            # The target's entry point.
            program = targets[target]
            if "args" not in container:
                fail(f"{where}: {program} without options")
            check_options(product, [program] + container["args"], where)
            words = [word.replace("=", " ") for word in container["args"]]
            check_ports(container, where)
        words += [variable["value"].replace("unix:", "") for variable in container.get("env", ())]
        check_files(words, container, volumes, secrets, where)
        probe = container.get("readinessProbe", {}).get("exec", {}).get("command")
        if probe:
            check_options(product, probe, where)
        check_rights(container, where)
    if used != set(volumes):
        fail(f"{where}: volumes {sorted(volumes)} and mounts of {sorted(used)}")
    for volume in volumes.values():
        # As YAML 1.1 and Kubernetes read it: 0400 is octal.
        if "secret" in volume and volume["secret"].get("defaultMode") != 0o400:
            fail(f"{where}: others may read the Secret {volume['secret']['secretName']}")


def check_ports(container, where):
    """The ports are those at which the program listens."""
    listens = {int(port) for word in container["args"] for port in re.findall(r"=0\.0\.0\.0:(\d+)$", word)}
    if listens != {port["containerPort"] for port in container.get("ports", ())}:
        fail(f"{where}: the program listens at {sorted(listens)}, and ports are {container.get('ports')}")


def check_rights(container, where):
    """Who has more than the usual rights has no filter of the runtime's, and the other way round for AppArmor."""
    rights = container.get("securityContext", {})
    if rights.get("privileged"):
        fail(f"{where}: privileged, which nothing of ours needs")
    more = set(rights.get("capabilities", {}).get("add", ()))
    if more and not {"SYS_ADMIN", "SYS_PTRACE"} <= more:
        fail(f"{where}: CRIU needs SYS_ADMIN and SYS_PTRACE besides {sorted(more)}")
    for profile in ("seccompProfile", "appArmorProfile"):
        if more and rights.get(profile, {}).get("type") != "Unconfined":
            fail(f"{where}: with the runtime's {profile}, CRIU does not work")


def secrets_of(folder, docs):
    """The files of each Secret, as the commands in the manifests make it, which docs/containers.md has, too."""
    found = {}
    for name in os.listdir(folder):
        text = re.sub(r" \\\n#?\s*", " ", open(os.path.join(folder, name)).read())
        for secret, rest in re.findall(r"kubectl create secret generic (\S+)(.*)", text):
            found[secret] = re.findall(r"--from-file (\S+)", rest)
            if not found[secret]:
                fail(f"{name}: the Secret {secret} is made without files")
            if docs and not all(one in docs for one in [f"kubectl create secret generic {secret}", *found[secret]]):
                fail(f"docs/containers.md makes the Secret {secret} in another way than {name}")
    return found


def main():
    folder, product = sys.argv[1:3]
    manifests = os.path.join(folder, "kubernetes")
    if sys.argv[3:4] == ["--show"]:
        show(os.path.join(manifests, sys.argv[4]), sys.argv[5])
        return
    dockerfile = open(os.path.join(folder, "containers", "Dockerfile")).read()
    # The program of each target: the entry point after its FROM.
    targets = dict(re.findall(r"^FROM \S+ AS (\S+)\n(?:(?!FROM)[^\n]*\n)*?ENTRYPOINT \[\"(\S+)\"\]", dockerfile, re.M))
    docs_path = os.path.join(folder, "..", "docs", "containers.md")
    docs = open(docs_path).read() if os.path.exists(docs_path) else fail("there is no docs/containers.md")
    secrets = secrets_of(manifests, re.sub(r" \\\n\s*", " ", docs))
    claims, wanted, wanted_secrets, namespaces, wanted_namespaces = set(), set(), set(), {None}, set()
    names = sorted(os.listdir(manifests))
    for name in names:
        if name not in docs:
            fail(f"docs/containers.md does not name {name}")
        for document in documents(os.path.join(manifests, name)):
            kind = document["kind"]
            where = f"{name}, {kind} {document['metadata']['name']}"
            if (document["apiVersion"], kind) not in KINDS:
                fail(f"{where}: {document['apiVersion']} is unknown")
            known = KINDS[document["apiVersion"], kind]
            fields = {"apiVersion": None, "kind": None, "metadata": METADATA, **({"spec": known} if known else {})}
            check_fields(document, fields, where)
            namespace = document["metadata"].get("namespace")
            wanted_namespaces.add(namespace)
            if kind == "Namespace":
                namespaces.add(document["metadata"]["name"])
            if kind == "PersistentVolumeClaim":
                claims.add((namespace, document["metadata"]["name"]))
            if kind not in ("DaemonSet", "Job"):
                continue
            template = document["spec"]["template"]
            if kind == "DaemonSet" and document["spec"]["selector"]["matchLabels"] != template["metadata"]["labels"]:
                fail(f"{where}: the selector does not match the template")
            pod = template["spec"]
            check_pod(pod, where, product, targets, secrets)
            wanted |= {(namespace, v["persistentVolumeClaim"]["claimName"]) for v in pod["volumes"] if "persistentVolumeClaim" in v}
            wanted_secrets |= {v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    if claims != wanted:
        fail(f"claims {sorted(map(str, claims))}, of which {sorted(map(str, wanted))} are used")
    if wanted_secrets != set(secrets):
        fail(f"Secrets {sorted(secrets)} are made, and {sorted(wanted_secrets)} are used")
    if not wanted_namespaces <= namespaces:
        fail(f"namespaces {wanted_namespaces}, of which there are {namespaces}")
    print(f"{len(names)} manifests, {len(targets)} images")


def show(path, what):
    for document in documents(path):
        if document["kind"] not in ("DaemonSet", "Job"):
            continue
        (container,) = document["spec"]["template"]["spec"]["containers"]
        if what == "capabilities":
            print(",".join(container["securityContext"]["capabilities"]["add"]))
        elif what == "probe":
            print("\n".join(container["readinessProbe"]["exec"]["command"]))
        elif what in ("args", "script"):
            print("\n".join(container["args"]))
        else:
            fail(f"{what} cannot be shown")
        return
    fail(f"{path} has no container")


if __name__ == "__main__":
    main()
