"""Check a run's record without worldsize: python verify_chain.py RUN_FOLDER [SHA-256 of the chain's last line]"""

import base64
import hashlib
import json
import sys
from itertools import zip_longest
from pathlib import Path

run = Path(sys.argv[1])
manifest = json.loads((run / "run_manifest.json").read_text())
problems = []

# every line has the SHA-256 of the line before it, so that the last one determines all
previous, links = "", []
for number, line in enumerate((run / "chain.jsonl").read_bytes().splitlines(), 1):
    link = json.loads(line)
    if link["previous"] != previous:
        problems.append(f"line {number} of chain.jsonl does not follow from the line before it")
    previous = hashlib.sha256(line).hexdigest()
    links.append(link)
heads = [sys.argv[2]] if len(sys.argv) > 2 else []
if chain := (manifest["results"] or {}).get("chain"):
    heads.append(chain["head"])
if links[0].get("run") != manifest["run_id"] or any(head != previous for head in heads):
    problems.append("the chain does not belong to the manifest, or does not end with the expected line")

# the logged values are those in the chain
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
for event, kind, key in (("step", "logged", None), ("evaluation", "evaluated", "metrics")):
    written = [row for row in rows if row["event"] == event]
    chained = [(link["step"], {key: link[kind]} if key else link[kind]) for link in links if kind in link]
    for row, link in zip_longest(written, chained):
        row, (step, values) = row or {}, link or (0, {})
        if row.get("step") != step or not values.items() <= row.items():
            problems.append(f"metrics.jsonl differs from the chain at step {row.get('step', step)}")
            break

# the checkpoints are those in the chain, and their files are complete
saved = {link["step"]: link["checkpoint"] for link in links if "checkpoint" in link}
for folder in sorted((run / "checkpoints").glob("step_*")):
    text = (folder / "manifest.json").read_bytes()
    if hashlib.sha256(text).hexdigest() != saved.get(int(folder.name.removeprefix("step_"))):
        problems.append(f"{folder.name} is not the checkpoint in the chain")
    for name, facts in json.loads(text)["files"].items():
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != facts["sha256"]:
                problems.append(f"{folder.name}/{name} is damaged")

# the signed statement is about these files; check its signature with a DSSE tool and the author's public key
if (run / "attestation.json").exists():
    envelope = json.loads((run / "attestation.json").read_text())
    for subject in json.loads(base64.b64decode(envelope["payload"]))["subject"]:
        path = run / subject["name"]
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() != subject["digest"]["sha256"]:
            problems.append(f"{subject['name']} is not the file in attestation.json")
print("\n".join(problems) or f"consistent: {len(links)} lines, ending with {previous}")
sys.exit(bool(problems))
