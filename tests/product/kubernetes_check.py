#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The manifests of packaging/kubernetes, as far as they can be checked without a cluster: their structure, and that the
programs know the options in them. Prints the script of the example job.

Usage: kubernetes_check.py FOLDER PRODUCT    FOLDER: packaging; PRODUCT: folder of the programs
"""

import os
import re
import subprocess
import sys

import yaml


def documents(path):
    with open(path) as f:
        return list(yaml.safe_load_all(f))


def fail(text):
    sys.exit(f"kubernetes_check: {text}")


def check_options(product, words, where):
    """Each option of a command line of ours is one that the program has."""
    helped = subprocess.run([os.path.join(product, words[0]), "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout
    for word in words[1:]:
        if word == "--":
            break
        option = word.split("=")[0]
        if option.startswith("--") and not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", helped):
            fail(f"{where}: {words[0]} has no option {option}")


def check_pod(pod, where, product):
    volumes = {volume["name"] for volume in pod["volumes"]}
    used = set()
    scripts = []
    for container in pod["containers"]:
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        if len(set(paths)) != len(paths):
            fail(f"{where}: two volumes at one path")
        used |= {mount["name"] for mount in container["volumeMounts"]}
        command = container.get("command")
        if command == ["/bin/bash", "-c"]:
            scripts += container["args"]
        else:
            check_options(product, [container["name"]] + container["args"], where)
        probe = container.get("readinessProbe", {}).get("exec", {}).get("command")
        if probe:
            check_options(product, probe, where)
    if used != volumes:
        fail(f"{where}: volumes {sorted(volumes)} and mounts of {sorted(used)}")
    return scripts


def main():
    folder, product = sys.argv[1:]
    targets = re.findall(r"^FROM \S+ AS (\S+)", open(os.path.join(folder, "containers", "Dockerfile")).read(), re.M)
    scripts, claims, wanted = [], set(), set()
    for name in ("cr-server.yaml", "job.yaml"):
        for document in documents(os.path.join(folder, "kubernetes", name)):
            kind = document["kind"]
            where = f"{name}, {kind} {document['metadata']['name']}"
            if kind == "PersistentVolumeClaim":
                claims.add(document["metadata"]["name"])
            if kind not in ("DaemonSet", "Job"):
                continue
            template = document["spec"]["template"]
            if kind == "DaemonSet" and document["spec"]["selector"]["matchLabels"] != template["metadata"]["labels"]:
                fail(f"{where}: the selector does not match the template")
            pod = template["spec"]
            scripts += check_pod(pod, where, product)
            wanted |= {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
            image = pod["containers"][0]["image"].split(":")[0]
            if kind == "DaemonSet" and image.replace("cuda-remote-", "") not in targets:
                fail(f"{where}: the Dockerfile has no target for {image}")
    if claims != wanted:
        fail(f"claims {sorted(claims)}, of which {sorted(wanted)} are used")
    if len(scripts) != 1:
        fail(f"{len(scripts)} scripts")
    print(scripts[0])


if __name__ == "__main__":
    main()
