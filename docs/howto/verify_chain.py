"""Check a run's record without worldsize: python verify_chain.py RUN_FOLDER [SHA-256 of the chain's last line]"""

import base64
import hashlib
import json
import re
import sys
from itertools import zip_longest
from pathlib import Path

COMPUTED = ("event", "step", "samples", "loss", "lr", "grad_norm", "skipped", "metrics")  # values that are not times
NOTHING: tuple[int, dict[str, object]] = (-1, {})
run = Path(sys.argv[1])
manifest = json.loads((run / "run_manifest.json").read_text())
problems, previous, links = [], "", []

# every line has the SHA-256 of the line before it, so that the last one determines all
for number, line in enumerate((run / "chain.jsonl").read_bytes().split(b"\n")[:-1], 1):
    link = json.loads(line)
    if link["previous"] != previous:
        problems.append(f"line {number} of chain.jsonl does not follow from the line before it")
    previous = hashlib.sha256(line).hexdigest()
    links.append(link)
if links[0].get("run") != manifest["run_id"] or any(head != previous for head in sys.argv[2:]):
    problems.append("the chain is of another run, or does not end with the expected line")
chain = (manifest["results"] or {}).get("chain", {})
is_sealed = chain and manifest["attempts"][-1]["exit_reason"] not in ("running", "killed")
if is_sealed and chain["head"] != previous:
    problems.append("the chain does not end with the line in the manifest")

# the logged values are those in the chain; a killed process may have written its last line only there
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]]
for event, kind in (("step", "logged"), ("evaluation", "evaluated")):
    written = [(row["step"], row) for row in rows if row["event"] == event]
    chained = [(link["step"], link[kind]) for link in links if kind in link]
    for (step, row), (expected, values) in zip_longest(written, chained, fillvalue=NOTHING):
        seen = {key: row[key] for key in COMPUTED if key in row} if event == "step" else row.get("metrics", {})
        if (step, seen) != (expected, values) and (is_sealed or step >= 0):
            problems.append(f"metrics.jsonl differs from the chain at step {max(step, expected)}")
            break

# the checkpoints are those in the chain, and their files are complete
saved = {link["step"]: link["checkpoint"] for link in links if "checkpoint" in link}
for folder in sorted(path for path in (run / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d+", path.name)):
    text, step = (folder / "manifest.json").read_bytes(), int(folder.name.removeprefix("step_"))
    if hashlib.sha256(text).hexdigest() != saved.get(step) and (is_sealed or step in saved):
        problems.append(f"{folder.name} is not the checkpoint in the chain")
    for name, facts in json.loads(text)["files"].items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != facts["sha256"]:
            problems.append(f"{folder.name}/{name} is damaged")

# the signed statement is about these files; check its signature with a DSSE tool and the author's public key
if (run / "attestation.json").exists():
    payload = base64.b64decode(json.loads((run / "attestation.json").read_text())["payload"])
    for each in json.loads(payload)["subject"]:
        path = run / each["name"]
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() != each["digest"]["sha256"]:
            problems.append(f"{each['name']} is not the file in attestation.json")
print("\n".join(problems) or f"consistent: {len(links)} lines, ending with {previous}")
sys.exit(bool(problems))
